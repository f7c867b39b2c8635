"""Generators that are made for a sample, and draws that samplers make late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_shard.resume.rng import rng_state, seed_rng, set_rng_state
from lightning_shard.resume.wrap import resumable
from tests.resume.test_reachable import LENGTH, Plain, make, resume


class Drawing(Plain):
    """Puts a new generator in the place of its own for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        self.own = np.random.default_rng(self.own.integers(2**31))
        return torch.tensor([index, self.own.random()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 1])
def test_generators_that_are_made_for_a_sample_are_seeded_by_it(workers: int) -> None:
    def made() -> Any:
        return make(Drawing(), seeded=True, num_workers=workers)

    whole = [batch.tolist() for batch in itertools.islice(made(), 9)]
    loader = made()
    for _ in itertools.islice(loader, 4):
        pass
    resumed = made()
    assert resume(resumed, loader.state_dict()) == []
    assert whole[4:] == [batch.tolist() for batch in itertools.islice(resumed, 5)]


class Choosing(Sampler[int]):
    """Draws each index when it is asked for, from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(LENGTH) for _ in range(10))


class Sized(Choosing):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_drawn_before_the_steps_draw(workers: int) -> None:
    def made() -> Any:
        return resumable(DataLoader(Plain(), 2, sampler=Sized(), num_workers=workers), world_size=1, rank=0)

    def seen(loader: Any, epochs: int, batches: int = 99) -> list[Any]:
        return [(batch.tolist(), random.random()) for _ in range(epochs) for batch in itertools.islice(loader, batches)]

    seed_rng(1)
    whole, drawn = seen(made(), 3), [seed_rng(1), Sized()][1]
    assert [index for batch, _ in whole[:5] for index in batch] == list(drawn)
    seed_rng(1)
    loader = made()
    first = seen(loader, 1) + seen(loader, 1, 3)
    state, generators = loader.state_dict(), rng_state()
    seed_rng(9)
    resumed = made()
    assert resume(resumed, state) == []
    set_rng_state(generators)
    assert first + seen(resumed, 2) == whole


def test_what_a_loader_without_a_length_draws_is_said() -> None:
    def made() -> Any:
        return resumable(DataLoader(Plain(), 2, sampler=Choosing()), world_size=1, rank=0)

    loader = made()
    batches = iter(loader)
    next(batches), next(batches)
    told = resume(made(), loader.state_dict())
    assert ["a sampler or a dataloader has no length" in message for message in told] == [True]


class Idle(Plain):
    """Holds generators of every kind, which it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = [torch.Generator(), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)]


def test_generators_that_nothing_draws_from_are_not_said() -> None:
    loader = make(Idle(), num_workers=1)
    for _ in itertools.islice(loader, 8):
        pass
    assert resume(make(Idle(), num_workers=1), loader.state_dict()) == []
