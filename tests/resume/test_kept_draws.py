"""What a batch that was fetched ahead drew, and draws that samplers make late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_shard.resume import reachable
from lightning_shard.resume.rng import rng_state, set_rng_state
from lightning_shard.resume.wrap import resumable
from tests.resume.support import Numbers
from tests.resume.test_reachable import Endless, Plain, make, resume


class Drawing(Numbers):
    """Draws a number for each sample, of a ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(200)
        self.kind, self.own = kind, np.random.default_rng(1)
        self.pair = [random.Random(1), random.Random(2)]

    def __getitem__(self, index: int) -> Any:
        if self.kind == "remade":
            self.own = np.random.default_rng(self.own.integers(2**31))
        if self.kind == "swapped":
            self.pair.reverse()
        drawn = {
            "remade": lambda: self.own.random(),
            "swapped": lambda: self.pair[0].random(),
            "global": lambda: random.random() + np.random.rand() + torch.rand(()).item(),
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


def test_all_that_a_dataset_holds_is_looked_through_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    walk = reachable.reachable
    monkeypatch.setattr(reachable, "reachable", lambda *of: (looks.append(1), walk(*of))[1])
    for _ in itertools.islice(resumable(DataLoader(Drawing("global"), sampler=Endless()), world_size=1, rank=0), 150):
        pass
    assert 4 < len(looks) < 30


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
