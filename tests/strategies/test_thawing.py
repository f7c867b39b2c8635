"""Parts that are thawed in mid-fit: the same numbers on every engine that follows, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint
from torch import Tensor

from tests.harness import run_distributed
from tests.models import quiet_trainer, whole
from tests.strategies.indexed import data
from tests.strategies.test_trainer_freezing import Backbone, Refreezing

NAMES = ["shard_ddp", "shard_fsdp", "shard_fsdp_hybrid", "shard_fsdp_grad_op", "shard_fsdp_offload"]
FEW = ["shard_ddp_aligned", "shard_fsdp_hybrid_aligned"]
EPOCHS = 4  # Thawed in the second.


def fit(strategy: str, precision: str, kind: str, *, folder: str = "", resume: str | None = None) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = Backbone()
    saving: list[Callback] = [ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)] if folder else []
    thawing = Refreezing() if kind == "refreeze" else BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    trainer = quiet_trainer(
        strategy=strategy,
        precision=precision,
        max_epochs=EPOCHS,
        callbacks=[thawing, *saving],
        enable_checkpointing=bool(saving),
    )
    trainer.fit(module, data(), ckpt_path=resume)
    [optimizer] = trainer.optimizers
    slots = {n: optimizer.state.get(p, {}).get("momentum_buffer") for n, p in module.named_parameters()}
    return {
        "epochs": module.epochs,
        "momentum": {name: whole(slot) for name, slot in slots.items() if slot is not None},
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def fit_all(names: list[str], precision: str, kind: str, folder: str) -> list[dict[str, Any]]:
    """A run of each name without a break, and of each what goes on from the first one's epochs before and after."""
    runs = []
    for index, name in enumerate(names):
        runs.append(fit(name, precision, kind, folder=folder if index == 0 else ""))
    for epoch in (0, 1, 2):
        runs += [fit(name, precision, kind, resume=f"{folder}/epoch={epoch}.ckpt") for name in names]
    return runs


def check(names: list[str], precision: str, kind: str, folder: Path) -> None:
    for runs in run_distributed(fit_all, 2, names, precision, kind, str(folder), timeout=300):
        first = runs[0]
        assert len(first["epochs"]) == EPOCHS
        for index, run in enumerate(runs):
            same(run["epochs"][-1], first["epochs"][-1], index)
            same(run["momentum"], first["momentum"], index)
            assert run["rates"] == first["rates"], index
        before, after = first["epochs"][0], first["epochs"][1]
        assert not torch.equal(before["backbone.0.0.weight"], after["backbone.0.0.weight"])
        assert "backbone.0.0.weight" in first["momentum"]


def same(one: dict[str, Tensor], other: dict[str, Tensor], index: int) -> None:
    assert one.keys() == other.keys(), index
    assert [name for name in one if not torch.equal(one[name], other[name])] == [], index


@pytest.mark.matrix
def test_a_thawed_backbone_and_its_resume(tmp_path: Path) -> None:
    check(FEW, "bf16-mixed", "backbone", tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["backbone", "refreeze"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("suffix", ["", "_aligned"])
def test_thawing_and_its_resume_under_every_name(tmp_path: Path, suffix: str, precision: str, kind: str) -> None:
    check([f"{name}{suffix}" for name in NAMES], precision, kind, tmp_path)
