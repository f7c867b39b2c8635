"""Units with settings of their own: when they are freed changes no number, and their dtype is seen where it is used."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lightning_shard import MeshConfig, ShardFSDPStrategy, UnitRule
from lightning_shard.errors import MeshError, PrecisionError, WrappingError
from lightning_shard.strategies.strategy import ShardStrategy
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer

FREED = [{"pattern": r"blocks\.0", "reshard_after_forward": False}, {"modules": 100}, "Embedding"]
WIDE = [{"pattern": "head", "compute": "fp32"}, {"modules": ["LayerNorm"], "compute": "fp32"}, "Block"]
HEAD = {"head.weight", *(f"blocks.{i}.norm.{kind}" for i in range(3) for kind in ("weight", "bias"))}


def _fit(strategy: ShardStrategy | str, precision: str) -> tuple[TinyLM, Final, pl.Trainer]:
    pl.seed_everything(1, verbose=False)
    module, final = TinyLM(), Final()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=4, callbacks=[final])
    trainer.fit(module, loader())
    return module, final, trainer


def _freed(precision: str) -> tuple[list[Any], list[str]]:
    strategy = ShardFSDPStrategy(aligned=True, units=FREED)  # type: ignore[arg-type]
    module, found, _ = _fit(strategy, precision)
    _, wanted, _ = _fit("shard_ddp_aligned", precision)
    units = {name: m for name, m in module.named_modules() if isinstance(m, FSDPModule)}
    stays = [name for name, m in units.items() if m._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is None]
    return stays, [n for n, value in wanted.parameters.items() if not torch.equal(value, found.parameters[n])]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_when_units_are_freed_changes_no_number(precision: str) -> None:
    # The root stays gathered too.
    assert run_distributed(_freed, 2, precision) == [(["", "blocks.0"], [])] * 2


def _wide() -> tuple[set[str], dict[str, set[torch.dtype]], list[str], bool]:
    _, found, trainer = _fit(ShardFSDPStrategy(aligned=True, units=WIDE), "bf16-mixed")  # type: ignore[arg-type]
    entries = trainer.strategy.ledger.entries
    wide = {name for name, entry in entries.items() if entry.column("forward") == {torch.float32}}
    gradients = {name: entries[name].column("backward") for name in HEAD}
    replicated = ShardFSDPStrategy(aligned=True, units=WIDE, mesh=MeshConfig(replicate=2, shard=1))  # type: ignore[arg-type]
    _, other, _ = _fit(replicated, "bf16-mixed")
    _, plain, _ = _fit("shard_fsdp_aligned", "bf16-mixed")
    different = [n for n, value in found.parameters.items() if not torch.equal(value, other.parameters[n])]
    changed = not torch.equal(found.parameters["head.weight"], plain.parameters["head.weight"])
    return wide, gradients, different, changed


def test_a_units_dtype_is_measured_and_replicas_have_the_numbers_of_shards() -> None:
    for wide, gradients, different, changed in run_distributed(_wide, 2):
        assert wide == HEAD
        assert gradients == {name: {torch.float32} for name in HEAD}
        assert (different, changed) == ([], True)


def _refused(units: list[Any], precision: str) -> str:
    with pytest.raises((MeshError, PrecisionError, WrappingError)) as error:
        quiet_trainer(strategy=ShardFSDPStrategy(units=units), precision=precision, max_steps=1).fit(TinyLM(), loader())
    return str(error.value)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (
            UnitRule(pattern="block.0"),
            "the whole name of no module with parameters and a forward of its own. Did you",
        ),
        (UnitRule(modules=["Blok"]), "Blok"),
        (UnitRule(modules=["Block"], reshard_after_forward=3), "reshard_after_forward is 3, but a number must divide"),
        (UnitRule(modules=["Block"], compute="fp16"), "small gradients of fp16 are lost without a loss scale"),
    ],
)
def test_what_the_model_or_the_run_lacks_is_refused(entry: UnitRule, reason: str) -> None:
    (text,) = run_distributed(_refused, 1, [entry], "bf16-mixed")
    assert reason in text
