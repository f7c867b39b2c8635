"""Directories of earlier format versions load bit by bit.

In version 1 no map says what the keys of optimizer state are and no ``boxes.bin`` where tensors lie; ``trainer.pt`` has
the states of all ranks.
``version_1/plain.ckpt`` was written by one process, ``zero_2.ckpt`` by two under ``shard_deepspeed_stage_2``, the
present one by two under ``shard_fsdp``, each after three steps of `Saved`, the present one after a batch of the fourth.
The ``.expected`` file beside each has the full tensors and optimizer state of that run, and by key what else it has.

``python -m tests.checkpoint.test_versions`` writes one of the present version.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import EMACallback, full_tensor
from lightning_shard.checkpoint.files.manifest import FORMAT_VERSION, read_manifest
from lightning_shard.checkpoint.load import open_checkpoint
from tests.checkpoint.calls import load_module
from tests.checkpoint.compare import assert_equal, stored
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer

FOLDER = Path(__file__).parent


class Moments(nn.Module):
    """Parameters named as an optimizer's slots are."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.randn(4))
        self.exp_avg = nn.Module()
        self.exp_avg.exp_avg = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.step + self.exp_avg.exp_avg


class Saved(pl.LightningModule):
    """Tied and frozen parameters, a buffer, and two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.exp_avg = nn.ModuleDict({"0": nn.Linear(4, 4), "step": Moments()})
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.seen += 1
        hidden = self.frozen(self.exp_avg["step"](self.exp_avg["0"](self.embed(batch)).tanh()))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": others, "weight_decay": 0.0, "lr": 0.02},
            {"params": decayed, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


class Writes(pl.Callback):
    """Saves after a batch of the fourth step, and beside it what the checkpoint is to have."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 != 7:
            return
        trainer.save_checkpoint(self.path)
        model = {n: full_tensor(trainer, n) for n, _ in module.named_parameters(remove_duplicate=False)}
        slots = {(n, slot): full_tensor(trainer, n, slot) for n in model for slot in ("step", "exp_avg", "exp_avg_sq")}
        averages = {key: t for key, t in stored(self.path).items() if key.startswith("average.")}
        if trainer.is_global_zero:
            # Of frozen ones there is no state.
            kept = {key: tensor for key, tensor in slots.items() if tensor is not None}
            found = {"model": {**model, "seen": module.seen.clone()}, "slots": kept, "beside": averages}
            torch.save(found, self.path.with_suffix(".expected"))


def _write(path: Path) -> None:
    pl.seed_everything(0)
    callbacks = [EMACallback(decay=0.7), Writes(path)]
    flags: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 4, "callbacks": callbacks}
    quiet_trainer(strategy="shard_fsdp", **flags).fit(Saved(), batches(count=40))


def batches(count: int = 12) -> DataLoader[Any]:
    return DataLoader([(torch.arange(5) * (i + 1)) % 8 for i in range(count)], batch_size=2)


def expected(name: str) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
    """FQN to parameter or buffer, and (FQN, slot) to optimizer state; tied ones under both names."""
    found = torch.load(FOLDER / f"{name}.expected", weights_only=True)
    return found["model"], found["slots"]


def test_averages_and_gradients_are_those_that_were_saved() -> None:
    version = FORMAT_VERSION
    beside = torch.load(FOLDER / f"version_{version}/fsdp.expected", weights_only=True)["beside"]
    assert "average" in {key.partition(".")[0] for key in beside}
    found = {key: tensor for key, tensor in stored(FOLDER / f"version_{version}/fsdp.ckpt").items() if key in beside}
    assert_equal(found, beside)


@pytest.mark.parametrize("name", ["version_1/plain", "version_1/zero_2", f"version_{FORMAT_VERSION}/fsdp"])
def test_module_and_optimizer_are_those_that_were_saved(name: str) -> None:
    path = FOLDER / f"{name}.ckpt"
    assert f"version_{read_manifest(path).format_version}" == path.parent.name
    open_checkpoint(path)
    module = Saved()
    optimizer = module.configure_optimizers()
    state, report = load_module(path, module=module, optimizers=[optimizer])
    assert (state["global_step"], report.missing, report.unexpected) == (3, (), ())
    model, slots = expected(name)
    live = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    assert live.keys() == model.keys()
    for fqn, tensor in model.items():
        assert torch.equal(live[fqn], tensor), fqn
    assert {(fqn, slot) for fqn, p in live.items() if p in optimizer.state for slot in optimizer.state[p]} == set(slots)
    for (fqn, slot), tensor in slots.items():
        assert torch.equal(optimizer.state[live[fqn]][slot], tensor), (fqn, slot)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.02, 0.0), (0.01, 0.1)]


class Look(pl.Callback):
    """What is there before the first batch of a resumed fit."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        model, slots = expected(self.name)
        self.differing = [n for n, v in model.items() if n != "seen" and not torch.equal(full_tensor(trainer, n), v)]
        self.differing += [key for key, v in slots.items() if not torch.equal(full_tensor(trainer, *key).float(), v)]
        self.steps = trainer.global_step


def _resume(strategy: str, name: str, count: int = 12, **flags: Any) -> tuple[int, int, list[Any]]:
    look = Look(name)
    trainer = quiet_trainer(strategy=strategy, max_steps=4, callbacks=[look], **flags)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The checkpoint was saved after 1 of the 2 batches")
        trainer.fit(Saved(), batches(count), ckpt_path=FOLDER / f"{name}.ckpt")
    return look.steps, trainer.global_step, look.differing


@pytest.mark.parametrize(("strategy", "ranks"), sampled([("shard_ddp", 1), ("shard_fsdp", 2)], 1))
def test_a_run_goes_on(strategy: str, ranks: int) -> None:
    assert run_distributed(_resume, ranks, strategy, "version_1/zero_2") == [(3, 4, [])] * ranks


def test_a_run_goes_on_in_the_middle_of_a_step() -> None:
    arguments = ("shard_ddp", f"version_{FORMAT_VERSION}/fsdp", 40)
    assert run_distributed(_resume, 2, *arguments, accumulate_grad_batches=2) == [(3, 4, [])] * 2


if __name__ == "__main__":
    target = FOLDER / f"version_{FORMAT_VERSION}/fsdp.ckpt"
    target.parent.mkdir(exist_ok=True)
    run_distributed(_write, 2, target)
