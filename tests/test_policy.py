"""The table of precisions, and which precision plugins a strategy takes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_shard import ShardDDPStrategy, ShardFSDPStrategy, ShardPrecision
from lightning_shard.errors import PrecisionError
from lightning_shard.plugins.precision import translate
from lightning_shard.precision.policy import PRECISIONS, PrecisionPolicy, policy_from

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "aligned", "compute", "rest"),
    [
        ("32-true", False, FP32, FP32),
        ("32-true", True, FP32, FP32),
        ("bf16-mixed", False, BF16, FP32),
        ("bf16-mixed", True, BF16, FP32),
        ("bf16-true", False, BF16, BF16),
        ("bf16-true", True, BF16, FP32),
    ],
)
def test_the_table(precision: str, aligned: bool, compute: torch.dtype, rest: torch.dtype) -> None:
    expected = PrecisionPolicy(compute=compute, master=rest, reduce=rest, accumulate=rest)
    assert policy_from(precision, aligned=aligned) == expected
    assert expected.is_mixed == (compute != rest)


def test_the_table_is_whole() -> None:
    assert PRECISIONS == ("32-true", "bf16-mixed", "bf16-true")


def test_a_policy_in_one_line() -> None:
    assert policy_from("bf16-mixed", aligned=False).text() == "compute bf16, master fp32, reduce fp32, accumulate fp32"


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("precision", ["64-true", "fp32", "transformer-engine", "", "bf16"])
def test_another_precision_is_refused_with_the_list(precision: str, aligned: bool) -> None:
    with pytest.raises(PrecisionError, match=f"precision is {precision!r}") as e:
        policy_from(precision, aligned=aligned)
    assert all(repr(name) in str(e.value) for name in PRECISIONS)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_fp16_is_refused_with_the_reason(precision: str) -> None:
    with pytest.raises(PrecisionError, match=r"fp16 needs a loss scale.*use 'bf16-mixed'"):
        policy_from(precision, aligned=False)


def test_the_plugin_knows_its_policy_and_refuses_at_once() -> None:
    assert ShardPrecision("bf16-true").policy(aligned=True) == policy_from("bf16-true", aligned=True)
    assert ShardPrecision().precision == "32-true"
    with pytest.raises(PrecisionError, match="'8-true'"):
        ShardPrecision("8-true")  # type: ignore[arg-type]


def test_clipping_needs_a_strategy() -> None:
    with pytest.raises(AssertionError, match="not connected"):
        ShardPrecision().clip_gradients(torch.optim.SGD([torch.ones(1)]), 1.0)


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        (Precision(), "32-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (MixedPrecision("bf16-mixed", device="cpu"), "bf16-mixed"),
    ],
)
def test_stock_plugins_are_translated(plugin: Precision, precision: str) -> None:
    translated = translate(plugin)
    assert translated is not None
    assert translated.precision == precision


def test_own_plugins_and_none_pass() -> None:
    own = ShardPrecision("bf16-mixed")
    assert translate(own) is own
    assert translate(None) is None


class QuantizedPrecision(Precision):
    """As Bitsandbytes' plugin: a subclass that replaces layers."""

    precision = "int8-training"  # type: ignore[assignment]


class NamesakePrecision(MixedPrecision):
    """A user's subclass of a stock plugin: whatever it overrides would be lost."""


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (DoublePrecision(), "DoublePrecision"),
        (QuantizedPrecision(), "QuantizedPrecision"),
        (NamesakePrecision("bf16-mixed", device="cpu"), "NamesakePrecision"),
    ],
)
def test_plugins_that_do_more_are_refused_by_name(plugin: Precision, name: str) -> None:
    with pytest.raises(PrecisionError, match=rf"'{plugin.precision}', by the plugin {name},.*'32-true', 'bf16-mixed'"):
        translate(plugin)


def test_an_own_scaler_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(PrecisionError, match="16-mixed"):
        translate(MixedPrecision("16-mixed", device="cpu", scaler=scaler))


def trainer(**settings: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **settings)


@pytest.mark.parametrize("strategy", ["shard_ddp", "shard_fsdp_aligned"])
@pytest.mark.parametrize(
    ("flag", "precision"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("32", "32-true"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_the_trainers_flag(strategy: str, flag: Any, precision: str) -> None:
    made = trainer(strategy=strategy, precision=flag)
    assert type(made.strategy.precision_plugin) is ShardPrecision
    assert made.precision == made.strategy.precision_plugin.precision == precision
    aligned = strategy.endswith("_aligned")
    assert made.strategy.policy == policy_from(precision, aligned=aligned)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [ShardDDPStrategy, ShardFSDPStrategy])
def test_the_trainers_flag_refused(make: Any) -> None:
    with pytest.raises(PrecisionError, match="'16-true'"):
        trainer(strategy=make(), precision="16-true")
    with pytest.raises(PrecisionError, match="DoublePrecision"):
        trainer(strategy=make(), precision="64-true")


def test_the_plugin_instead_of_the_flag() -> None:
    plugin = ShardPrecision("bf16-mixed")
    made = trainer(strategy="shard_fsdp", plugins=[plugin])
    assert made.strategy.precision_plugin is plugin
    assert made.precision == "bf16-mixed"
