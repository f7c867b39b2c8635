"""DeepSpeed's own checkpoints, saved in real processes: partitions become full tensors, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_shard.checkpoint.files.layout import EXTRA_STATE, OPTIMIZER_STATES
from lightning_shard.checkpoint.inspect import describe, open_any
from tests.checkpoint.foreign.stock import CLIENT, Tied, fit, groups_of, save_deepspeed, state_of
from tests.harness import run_distributed


def check(path: Path, expected: dict[str, Tensor], stage: int, ranks: int) -> None:
    stored = open_any(path)
    found = {key: tensor.read() for key, tensor in stored.tensors.items()}
    for key, tensor in expected.items():
        assert torch.equal(found.pop(key), tensor), key
    steps = {key: found.pop(key) for key in list(found) if key.endswith(".step")}
    assert len(steps) == len(expected) // 3
    assert all(step.item() == 3 for step in steps.values())
    assert found.keys() == {"model.frozen", "model.shift"}
    assert found["model.frozen"].tolist() == [0.25, 0.5, 0.75]
    assert found["model.shift"].item() == 2.5
    assert stored.aliases == {"model.tied.weight": "model.first.weight"}
    assert (stored.facts.world_size, stored.facts.engine) == (ranks, f"DeepSpeed ZeRO-{stage}")
    (described,) = stored.trainer_state[OPTIMIZER_STATES]
    weights, rest = described["groups"]
    assert sorted(weights["params"]) == ["first.weight", "second.weight"]
    assert sorted(rest["params"]) == ["first.bias", "one", "tied.bias"]
    assert (weights["weight_decay"], rest["weight_decay"], rest["lr"]) == (0.3, 0.01, 0.1 * 0.5**3)
    assert (stored.trainer_state["epoch"], stored.trainer_state["mine"]) == tuple(CLIENT.values())
    assert stored.trainer_state[EXTRA_STATE] == {"second._extra_state": torch.tensor(3)}
    assert "model.first.weight" in describe(path, stored)


class FromDeepSpeed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.started: dict[str, Tensor] = {}
        for name, child in Tied().named_children():
            self.add_module(name, child)
        whole = Tied()
        self.one, self.frozen = whole.one, whole.frozen
        self.tied.weight = self.first.weight
        self.register_buffer("shift", torch.tensor(0.0))

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return Tied.forward(self, rows).square().mean()

    def on_train_start(self) -> None:
        self.started = state_of(self.trainer)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(groups_of(self), lr=9.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def start_from_deepspeed(path: str) -> tuple[dict[str, Tensor], float, int]:
    trainer = fit("shard_fsdp", 1, ckpt_path=path, module=FromDeepSpeed, max_steps=1)
    module, schedule = trainer.lightning_module, trainer.lr_scheduler_configs[0].scheduler
    return module.started, schedule.last_epoch, module.second.calls


def test_deepspeed_partitions_become_full_tensors(stock_folders: Path, deepspeed_tensors: Any) -> None:
    for stage in 2, 3:
        check(stock_folders / f"zero{stage}", deepspeed_tensors[stage], stage, 2)
    path = str(stock_folders / "zero3")
    started, last_epoch, calls = run_distributed(start_from_deepspeed, 2, path)[0]
    assert last_epoch == 3, "the checkpoint's scheduler; one step ends no epoch"
    assert calls == 4
    for key, tensor in open_any(path).tensors.items():
        name = key.removeprefix("model.").removeprefix("optimizer.0.")
        assert torch.equal(started[name], tensor.read().to(started[name].dtype)), key


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "bf16", "ranks", "subgroups"), [(1, True, 3, 10**9), (3, True, 2, 10**9), (3, False, 3, 20)]
)
def test_deepspeed_partitions_of_other_runs(tmp_path: Path, stage: int, bf16: bool, ranks: int, subgroups: int) -> None:
    expected = run_distributed(save_deepspeed, ranks, stage, bf16, str(tmp_path), subgroups, timeout=300)[0]
    check(tmp_path, expected, stage, ranks)
