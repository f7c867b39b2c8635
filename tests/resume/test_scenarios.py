"""Runs of random settings that are saved after any step and go on under any engine, at any number of processes.

At the same number of processes each is bitwise the run that never stopped; at another one steps have the same samples.
"""

from __future__ import annotations

import itertools
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

GLOBAL = 12  # samples of a batch of all processes: 1, 2, 3 and 4 divide it
UNEVEN, EVEN = 46, 48  # Samples of an epoch; the even ones are no others at another number of processes.
STEPS = 7


class Augmented(Dataset[Any]):
    """Draws for each sample from the global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(6) + random.random()
        return torch.tensor(index), noise + torch.arange(6) * index / UNEVEN


def _loader(spec: dict[str, Any], per_rank: int) -> Any:
    options = {"num_workers": spec["workers"], "persistent_workers": spec["persistent"] and spec["workers"] > 0}
    kind, data = spec["loader"], Augmented(spec["samples"])
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), per_rank, True), **options)
    cls: Any = StatefulDataLoader if kind == "stateful" else DataLoader
    made = cls(data, per_rank, shuffle=spec["shuffle"], drop_last=spec["drop_last"], **options)
    return CombinedLoader({"a": made}, "min_size") if kind == "combined" else made


class Module(pl.LightningModule):
    def __init__(self, spec: dict[str, Any], *, dropout: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.spec, self.seen = spec, list[Any]()
        drop = nn.Dropout(0.2 if dropout else 0.0)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), drop, nn.Linear(9, 6))
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


def fit(name: str, spec: dict[str, Any], folder: str, *, save: int | None, resume: bool, dropout: bool) -> Any:
    """The batches, with their losses, and the parameters at the end."""
    os.chdir(folder)
    pl.seed_everything(1, verbose=False)
    world = torch.distributed.get_world_size()
    module, saves = Module(spec, dropout=dropout), Saves(save)
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
    trainer.fit(module, _loader(spec, GLOBAL // world), ckpt_path="saved.ckpt" if resume else None)
    return module.seen, saves.parameters, module.count.item(), saves.batches


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "samples": UNEVEN,
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
        "worlds": (draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 4])),
    }


def _engine(name: str, world: int) -> str:
    return name.replace("_hybrid", "") if world == 3 else name


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_a_run_goes_on_under_another_engine_as_if_it_had_not_stopped(tmp_path: Any, seed: int) -> None:
    spec = drawn(seed)
    writer, reader = spec["names"]
    options = {"dropout": True}
    whole = run_distributed(fit, 2, writer, spec, str(tmp_path), save=spec["save"], resume=False, **options)
    rest = run_distributed(fit, 2, reader, spec, str(tmp_path), save=None, resume=True, **options)
    for (seen, parameters, count, batches), (after, resumed, counted, _) in zip(whole, rest, strict=True):
        assert after == seen[batches:], spec
        assert count == counted, spec
        for fqn, value in parameters.items():
            assert torch.equal(value, resumed[fqn]), (fqn, spec)
    assert [b[2] for b in whole[0][0]] != [b[2] for b in whole[1][0]]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_a_run_goes_on_at_another_number_of_processes_with_the_same_samples(tmp_path: Any, seed: int) -> None:
    spec = {**drawn(seed), "samples": EVEN, "accumulate": 1, "precision": "32-true"}
    spec["loader"] = {"combined": "combined", "stateful": "stateful"}.get(spec["loader"], "stock")
    worlds = spec["worlds"]
    names = [_engine(name, world) for name, world in zip(spec["names"], worlds, strict=True)]
    options = {"dropout": False}
    whole = run_distributed(fit, worlds[0], names[0], spec, str(tmp_path), save=spec["save"], resume=False, **options)
    rest = run_distributed(fit, worlds[1], names[1], spec, str(tmp_path), save=None, resume=True, **options)

    def samples(runs: Any) -> list[Any]:
        batches = zip(*(seen for seen, *_ in runs), strict=True)
        return [(b[0][:2], sorted(itertools.chain.from_iterable(part[2] for part in b))) for b in batches]

    assert samples(rest) == samples(whole)[whole[0][3] :], spec
    for fqn, value in whole[0][1].items():
        # Sums of as many samples in other orders, over fewer than ten steps of at most 1e-2.
        torch.testing.assert_close(rest[0][1][fqn], value, rtol=1e-4, atol=1e-5)
