"""The table of precisions, and which precision plugins a strategy takes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_shard import LossScaling, ShardPrecision
from lightning_shard.errors import ConfigurationError, PrecisionError
from lightning_shard.precision.policy import PrecisionPolicy, policy_from
from lightning_shard.precision.words import PRECISIONS
from lightning_shard.strategies.precision import shard_precision_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("precision", "aligned", "compute", "rest"),
    [
        ("32-true", False, FP32, FP32),
        ("32-true", True, FP32, FP32),
        ("bf16-mixed", False, BF16, FP32),
        ("bf16-mixed", True, BF16, FP32),
        ("bf16-true", False, BF16, BF16),
        ("bf16-true", True, BF16, FP32),
        ("16-mixed", False, FP16, FP32),
        ("16-mixed", True, FP16, FP32),
        ("16-true", False, FP16, FP16),
        ("16-true", True, FP16, FP32),
    ],
)
def test_the_table(precision: str, aligned: bool, compute: torch.dtype, rest: torch.dtype) -> None:
    scale = LossScaling() if (compute, rest) == (FP16, FP32) else None
    expected = PrecisionPolicy(
        compute=compute, master=rest, reduce=rest, accumulate=rest, output=rest, loss_scale=scale
    )
    assert policy_from(precision, aligned=aligned) == expected
    assert expected.is_low_memory == (rest != FP32)


def test_overrides() -> None:
    narrow = policy_from("bf16-mixed", aligned=False, reduce=BF16, output=FP32)
    assert (narrow.reduce, narrow.accumulate, narrow.output, narrow.master) == (BF16, FP32, FP32, FP32)
    # What waits for the boundary is summed before the reduction widens or narrows it.
    assert policy_from("bf16-mixed", aligned=False, reduce=BF16, at_boundary=True).accumulate == BF16
    assert policy_from("bf16-true", aligned=False, reduce=FP32).accumulate == BF16
    scaling = LossScaling(initial=4.0)
    assert policy_from("16-mixed", aligned=True, loss_scale=scaling).loss_scale == scaling


@pytest.mark.parametrize(
    ("precision", "aligned", "overrides", "message"),
    [
        ("bf16-mixed", True, {"reduce": BF16}, "reduce is bf16 while aligned is true"),
        (
            "bf16-mixed",
            False,
            {"reduce": FP16},
            "reduce is fp16 while compute is bf16, but must be fp32 or the same:",
        ),
        ("32-true", False, {"output": BF16}, "output is bf16 while compute is fp32, but must be fp32"),
        ("bf16-mixed", False, {"loss_scale": LossScaling()}, "loss_scale is set while compute is bf16 and master fp32"),
        ("16-true", False, {"loss_scale": LossScaling()}, "loss_scale is set .*master fp16, .*underflow again"),
    ],
)
def test_contradictory_overrides(precision: str, aligned: bool, overrides: Any, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        policy_from(precision, aligned=aligned, **overrides)


def test_the_plugin_knows_its_policy_and_refuses_at_once() -> None:
    assert ShardPrecision("bf16-true").policy(aligned=True) == policy_from("bf16-true", aligned=True)
    assert ShardPrecision().precision == "32-true"
    with pytest.raises(PrecisionError, match="precision is '64-true'") as caught:
        ShardPrecision("64-true")  # type: ignore[arg-type]
    assert all(name in str(caught.value) for name in (*PRECISIONS, "fp8-mixed"))
    with pytest.raises(PrecisionError, match="reduce is 'float32', but must be 'fp32', 'bf16', 'fp16' or None"):
        ShardPrecision("bf16-mixed", reduce="float32")  # type: ignore[arg-type]
    with pytest.raises(PrecisionError, match="loss_scale is set while compute is bf16"):
        ShardPrecision("bf16-mixed", loss_scale=LossScaling()).policy(aligned=False)
    # Right under one form of a strategy: that decides when it is known.
    assert ShardPrecision("16-true", loss_scale=LossScaling()).policy(aligned=True).loss_scale == LossScaling()
    assert ShardPrecision("bf16-mixed", reduce="bf16").policy(aligned=False).reduce == BF16


# Lightning calls it by the older name too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_plugin_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--plugins", type=Precision)
    init = {"precision": "16-mixed", "reduce": "fp32", "output": "fp32", "loss_scale": {"initial": 64, "hysteresis": 2}}
    text = yaml.safe_dump({"plugins": {"class_path": "lightning_shard.ShardPrecision", "init_args": init}})
    plugin = parser.instantiate(parser.parse_string(text)).plugins
    assert type(plugin) is ShardPrecision
    assert plugin.policy(aligned=True) == policy_from(
        "16-mixed", aligned=True, output=FP32, loss_scale=LossScaling(initial=64.0, hysteresis=2)
    )


def test_it_needs_a_strategy_of_this_package() -> None:
    stock = trainer(strategy="auto", plugins=[ShardPrecision()], enable_model_summary=False)
    with pytest.raises(ConfigurationError, match="Use strategy='shard_ddp' or another name"):
        stock.fit(BoringModel())


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        (Precision(), "32-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (MixedPrecision("bf16-mixed", device="cpu"), "bf16-mixed"),
    ],
)
def test_stock_plugins_are_translated(plugin: Precision, precision: str) -> None:
    translated = shard_precision_of(plugin)
    assert translated is not None
    assert translated.precision == precision
    assert shard_precision_of(translated) is translated
    assert shard_precision_of(None) is None


class NamesakePrecision(MixedPrecision):
    """A user's subclass of a stock plugin: whatever it overrides would be lost."""


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (DoublePrecision(), "DoublePrecision"),
        (NamesakePrecision("bf16-mixed", device="cpu"), "NamesakePrecision"),
    ],
)
def test_plugins_that_do_more_are_refused_by_name(plugin: Precision, name: str) -> None:
    with pytest.raises(PrecisionError, match=rf"'{plugin.precision}', by the plugin {name},.*They run 32-true, bf16"):
        shard_precision_of(plugin)


class OwnScaler(torch.amp.GradScaler):
    """A user's subclass with the default settings."""


@pytest.mark.parametrize(
    "scaler",
    [
        torch.amp.GradScaler("cpu", init_scale=4.0),
        OwnScaler("cpu"),
    ],
    ids=["init_scale", "subclass"],
)
def test_an_own_scaler_is_refused(scaler: torch.amp.GradScaler) -> None:
    name = type(scaler).__name__
    with pytest.raises(PrecisionError, match=rf"'16-mixed', by the plugin MixedPrecision with a {name} of its own"):
        shard_precision_of(MixedPrecision("16-mixed", device="cpu", scaler=scaler))


def trainer(**settings: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **settings)


@pytest.mark.parametrize(
    ("strategy", "flag", "precision"),
    [
        ("shard_ddp", None, "32-true"),
        ("shard_fsdp_aligned", 32, "32-true"),
        ("shard_ddp", "bf16", "bf16-mixed"),
        ("shard_ddp", "16-true", "16-true"),
    ],
)
def test_the_trainers_flag(strategy: str, flag: Any, precision: str) -> None:
    made = trainer(strategy=strategy, precision=flag)
    assert type(made.strategy.precision_plugin) is ShardPrecision
    assert made.precision == made.strategy.precision_plugin.precision == precision
    aligned = strategy.endswith("_aligned")
    assert made.strategy.policy == policy_from(precision, aligned=aligned)  # type: ignore[attr-defined]
