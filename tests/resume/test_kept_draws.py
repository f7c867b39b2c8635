"""What a batch that was fetched ahead drew, and draws that data sets keep and samplers make late."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_shard.resume.rng import rng_state, set_rng_state
from lightning_shard.resume.wrap import resumable
from tests.resume.support import Numbers
from tests.resume.test_reachable import Endless, Plain, make, resume


class Drawing(Numbers):
    """Draws a number for each sample, of a ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(200)
        self.kind, self.own, self.source = kind, np.random.default_rng(1), np.random.SeedSequence(2)
        self.pair, self.seeds, self.cache = [random.Random(1), random.Random(2)], list(range(500)), dict[int, int]()
        self.memo = functools.lru_cache(lambda index: self.own.random())
        self.held = [None] * 200

    def __getitem__(self, index: int) -> Any:
        if self.kind == "remade":
            self.own = np.random.default_rng(self.own.integers(2**31))
        if self.kind == "swapped":
            self.pair.reverse()
        if self.kind == "cache":
            self.cache.setdefault(index, random.randrange(10**6))
        if self.kind == "held":
            self.held[index] = self.held[index] or random.randrange(10**6)
        drawn = {
            "remade": lambda: self.own.random(),
            "swapped": lambda: self.pair[0].random(),
            "global": lambda: random.random() + np.random.rand() + torch.rand(()).item(),
            "seeds": lambda: np.random.default_rng(self.seeds.pop()).random(),
            "spawned": lambda: np.random.default_rng(self.source.spawn(1)[0]).random(),
            "memo": lambda: self.memo(index),
            "cache": lambda: self.cache[index],
            "held": lambda: self.held[index],
        }
        return torch.tensor([index, drawn[self.kind]()], dtype=torch.float64)


def trained(loader: Any, steps: int) -> list[list[float]]:
    """Rows of so many batches, with the next one fetched ahead of a step that draws."""
    batches = iter(loader)
    ahead, seen = next(batches), []
    for _ in range(steps):
        batch, ahead = ahead, next(batches)
        seen += batch.tolist()
        random.random(), np.random.rand(), torch.rand(3)
    return seen


@pytest.mark.parametrize("kind", ["remade", "swapped", "global"])
def test_what_a_batch_that_was_fetched_ahead_drew_is_drawn_alike(kind: str) -> None:
    def made() -> Any:
        return resumable(DataLoader(Drawing(kind), 2, sampler=Endless()), world_size=1, rank=0)

    for steps in range(1, 9):
        pl.seed_everything(1, verbose=False)
        whole = trained(made(), 12)
        pl.seed_everything(1, verbose=False)
        loader = made()
        seen, state, generators = trained(loader, steps), loader.state_dict(), rng_state()
        resumed = made()
        assert resume(resumed, state) == []
        set_rng_state(generators)
        assert seen + trained(resumed, 12 - steps) == whole


@pytest.mark.parametrize("workers", [0, 1])
def test_generators_that_are_made_for_a_sample_are_seeded_by_it(workers: int) -> None:
    def made() -> Any:
        return make(Drawing("remade"), seeded=True, num_workers=workers)

    whole = [batch.tolist() for batch in itertools.islice(made(), 9)]
    loader = made()
    for _ in itertools.islice(loader, 4):
        pass
    resumed = made()
    assert resume(resumed, loader.state_dict()) == []
    assert whole[4:] == [batch.tolist() for batch in itertools.islice(resumed, 5)]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("seeds", "seeds"),
        ("spawned", "source"),
        ("memo", "memo"),
        ("cache", "cache"),
        ("held", "held"),
        ("global", None),
    ],
)
def test_draws_that_are_kept_are_said(kind: str, said: str | None, seeded: bool) -> None:
    """In a list of seeds, in a sequence of them, and in caches, where samples draw."""
    loader = make(Drawing(kind), seeded=seeded)
    for _ in itertools.islice(loader, 70):
        pass
    told = resume(make(Drawing(kind), seeded=seeded), loader.state_dict())
    assert [f"changes dataset.{said} as samples are loaded" in message for message in told] == [True] * bool(said)


class Choosing(Sampler[int]):
    """Draws each index when it is asked for, from a generator of its own or the global one."""

    def __init__(self, own: bool) -> None:
        self.draw = random.Random(3) if own else random

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.draw.randrange(200)


@pytest.mark.parametrize(("own", "steps_draw", "said"), [(True, True, 0), (False, False, 0), (False, True, 1)])
def test_a_sampler_that_draws_between_steps_that_do_is_said(own: bool, steps_draw: bool, said: int) -> None:
    def made() -> Any:
        return resumable(DataLoader(Plain(), 2, sampler=Choosing(own)), world_size=1, rank=0)

    loader = made()
    for _ in itertools.islice(loader, 5):
        random.random() if steps_draw else None
    told = resume(made(), loader.state_dict())
    assert ["draws from the global random number generators as" in message for message in told] == [True] * said


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
