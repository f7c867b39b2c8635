"""Random numbers that a dataset draws for its samples from the global generators, with and without workers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from lightning_shard.resume.rng import seed_rng
from lightning_shard.resume.wrap import resumable
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.resume.support import Numbers, through_file

LENGTH = 18


class Noisy(Dataset[Any]):
    """Its samples have numbers of each global generator, as often as one of them says."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand(()).item() for _ in range(random.randint(1, 3))]
        return torch.tensor([index, sum(drawn), np.random.rand()])


class NoisyBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] + torch.rand(()) for index in indices]


def make(
    dataset: Any, *, seeded: bool = True, ranks: tuple[int, int] = (1, 0), seed: int = 3, epoch: int = 0, **options: Any
) -> Any:
    sampler = DistributedSampler(dataset, *ranks, seed=3)
    stock = DataLoader(dataset, 2, sampler=sampler, **options)
    draws = (lambda: (seed, sampler.epoch)) if seeded else None
    loader = resumable(stock, world_size=ranks[0], rank=ranks[1], draws=draws)
    sampler.set_epoch(epoch)
    return loader


def rows(batches: Any) -> list[list[float]]:
    return [row for batch in batches for row in batch.tolist()]


def test_a_sample_has_the_same_numbers_whatever_loads_it() -> None:
    whole = rows(make(Noisy(), epoch=1))
    assert len({row[1] for row in whole}) == LENGTH
    batches = [rows(make(NoisyBatches(), num_workers=workers)) for workers in (0, 1)]
    assert batches[0] == batches[1]
    loader = make(Noisy(), epoch=1, num_workers=2)
    first = rows(itertools.islice(loader, 3))
    state = through_file(loader.state_dict())
    assert first == whole[:6]
    for workers in (0, 1):
        # The epoch's numbers are of the seed with which it was begun.
        resumed = make(Noisy(), num_workers=workers, seed=8)
        resumed.load_state_dict(state)
        assert first + rows(resumed) == whole, workers
    shares = []
    for rank in range(2):
        # Subset has __getitems__, and loads samples one by one all the same.
        resumed = make(Subset(Noisy(), range(LENGTH)), ranks=(2, rank))
        resumed.load_state_dict(state)
        shares.append(rows(resumed))
    assert sorted(first + shares[0] + shares[1]) == sorted(whole)


def test_epochs_iterations_and_seeds_have_numbers_of_their_own() -> None:
    loader = make(Noisy(), num_workers=1, persistent_workers=True)
    found = [rows(loader), rows(loader)]
    loader.sampler.set_epoch(1)
    found += [rows(loader), rows(make(Noisy(), seed=4))]
    numbers = {row[1] for run in found for row in run}
    assert len(numbers) == 4 * LENGTH
    assert found[2] == rows(make(Noisy(), epoch=1))


def test_the_training_process_draws_as_if_nothing_had_been_drawn() -> None:
    found = []
    for dataset in (Noisy(), Numbers(LENGTH)):
        seed_rng(3)
        for _ in make(dataset):
            pass
        found.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert found[0] == found[1]


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.rows: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.rows += batch.tolist()
        return self.layer(batch * torch.rand(())).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(ckpt_path: str | None = None, **loader: Any) -> tuple[list[list[float]], Any]:
    pl.seed_everything(4, verbose=False)
    module = Regression()
    saves = ModelCheckpoint("saves", "{step}", every_n_train_steps=10, save_top_k=-1)
    trainer = quiet_trainer(strategy="shard_ddp_aligned", max_epochs=3, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(module, DataLoader(Noisy(), 3, **loader), ckpt_path=ckpt_path)
    return module.rows, module.layer.weight.tolist()


def _interrupted() -> list[Any]:
    whole = _fit()
    return [whole, *(_fit("saves/step=10.ckpt", num_workers=workers) for workers in (0, 2))]


def test_a_run_with_workers_goes_on() -> None:
    """From after batch 10 of three epochs."""
    [((rows, weight), *resumed)] = run_distributed(_interrupted, 1)
    for rest, other in resumed:
        assert (rest, other) == (rows[-(3 * LENGTH - 30) :], weight)
