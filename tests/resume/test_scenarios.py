"""Runs of random settings that are saved after any step go on under any engine, bitwise as if they had not stopped."""

from __future__ import annotations

import os
import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_shard.registry import build
from lightning_shard.strategies.precision import ShardPrecision
from tests.harness import run_distributed
from tests.models import all_parameters, quiet_trainer
from tests.strategies.test_switch import NAMES

PER_RANK, SAMPLES = 6, 46
STEPS = 7


class Augmented(Dataset[Any]):
    """Draws for each sample from the global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(6) + random.random()
        return torch.tensor(index), noise + torch.arange(6) * index / SAMPLES


def _loader(spec: dict[str, Any]) -> Any:
    options = {"num_workers": spec["workers"], "persistent_workers": spec["persistent"] and spec["workers"] > 0}
    kind, data = spec["loader"], Augmented(SAMPLES)
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), PER_RANK, True), **options)
    cls: Any = StatefulDataLoader if kind == "stateful" else DataLoader
    made = cls(data, PER_RANK, shuffle=spec["shuffle"], drop_last=spec["drop_last"], **options)
    return CombinedLoader({"a": made}, "min_size") if kind == "combined" else made


class Module(pl.LightningModule):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.spec, self.seen = spec, list[Any]()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 6))
        self.net.append(nn.Linear(6, 6, bias=False))
        if spec["tied"]:
            self.again = self.net[5]
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, features = batch["a"] if isinstance(batch, dict) else batch
        self.count += 1
        loss = self.net(features).square().mean()
        self.seen.append((self.current_epoch, batch_idx, ids.tolist(), loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(())

    def val_dataloader(self) -> Any:
        return DataLoader(torch.rand(4, 6), 1)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
        kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
        optimizer = kinds[self.spec["optimizer"]](groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.spec["schedule"]}}


class Saves(pl.Callback):
    def __init__(self, after: int | None) -> None:
        self.after, self.batches = after, 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Module, *_: Any) -> None:
        if trainer.global_step == self.after and not self.batches:
            self.batches = len(module.seen)
            trainer.save_checkpoint("saved.ckpt")

    def on_train_end(self, trainer: pl.Trainer, module: Module) -> None:
        self.parameters = all_parameters(trainer)


def fit(name: str, spec: dict[str, Any], folder: str, *, save: int | None, resume: bool) -> Any:
    """The batches, with their losses, and the parameters at the end."""
    os.chdir(folder)
    pl.seed_everything(1, verbose=False)
    module, saves = Module(spec), Saves(save)
    trainer = quiet_trainer(
        strategy=build(name),
        plugins=[ShardPrecision(spec["precision"])],
        max_steps=STEPS,
        accumulate_grad_batches=spec["accumulate"],
        gradient_clip_val=spec["clip"],
        val_check_interval=spec["validate"],
        num_sanity_val_steps=0,
        callbacks=[saves],
    )
    trainer.fit(module, _loader(spec), ckpt_path="saved.ckpt" if resume else None)
    return module.seen, saves.parameters, module.count.item(), saves.batches


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "precision": draw.choice(["32-true", "bf16-mixed", "16-mixed"]),
        "accumulate": draw.choice([1, 1, 2, 3]),
        "clip": draw.choice([None, 0.1]),
        "validate": draw.choice([1.0, 2, 3]),
        "loader": draw.choice(["stock", "stock", "stateful", "combined", "batch sampler"]),
        "shuffle": draw.random() < 0.7,
        "drop_last": draw.random() < 0.5,
        "workers": draw.choice([0, 0, 1, 2]),
        "persistent": draw.random() < 0.5,
        "optimizer": draw.choice(["adamw", "adam"]),
        "schedule": draw.choice(["step", "epoch"]),
        "tied": draw.random() < 0.3,
        "names": (draw.choice(NAMES), draw.choice(NAMES)),
        "save": draw.randrange(1, STEPS - 1),
    }


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_a_run_goes_on_under_another_engine_as_if_it_had_not_stopped(tmp_path: Any, seed: int) -> None:
    spec = drawn(seed)
    writer, reader = spec["names"]
    whole = run_distributed(fit, 2, writer, spec, str(tmp_path), save=spec["save"], resume=False)
    rest = run_distributed(fit, 2, reader, spec, str(tmp_path), save=None, resume=True)
    for (seen, parameters, count, batches), (after, resumed, counted, _) in zip(whole, rest, strict=True):
        assert after == seen[batches:], spec
        assert count == counted, spec
        for fqn, value in parameters.items():
            assert torch.equal(value, resumed[fqn]), (fqn, spec)
    assert [b[2] for b in whole[0][0]] != [b[2] for b in whole[1][0]]
