"""State of a dataset is in a checkpoint by its ``state_dict``, and all other state that is seen is named once."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_shard.resume.wrap import resumable
from tests.resume.support import Numbers, ids, through_file


class Part(Numbers):
    """Counts its samples, and has that as its state."""

    asked = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([index, self.asked])

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def test_a_dataset_with_a_state_goes_on_and_with_workers_that_is_said() -> None:
    def make(**options: Any) -> Any:
        return resumable(DataLoader(Part(9), 2, **options), world_size=1, rank=0)

    whole, loader = ids(make()), make()
    first = ids(itertools.islice(loader, 2))
    state = through_file(loader.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    assert first + ids(resumed) == whole
    with pytest.warns(UserWarning, match=r"in Part\.state_dict\(\) in worker processes is in no checkpoint"):
        make(num_workers=1).load_state_dict(state)


class Noisy(Numbers):
    """Draws from a generator of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = random.Random(3)


def test_a_dataset_with_a_generator_is_said() -> None:
    loader = resumable(DataLoader(Noisy(9), 2), world_size=1, rank=0)
    with pytest.warns(UserWarning, match=r"in Noisy\.rng is in no checkpoint"):
        loader.load_state_dict(through_file(loader.state_dict()))


def test_what_earlier_versions_saved_of_attributes_is_said() -> None:
    loader = resumable(DataLoader(Numbers(9), 2), world_size=1, rank=0)
    state = loader.state_dict() | {"attributes_now": {"lost": ["Own.1.a"], "Own.1.rng": {"legacy": {}}}}
    with pytest.warns(UserWarning, match=r"in Own\.1\.a, Own\.1\.rng is in no checkpoint"):
        loader.load_state_dict(state)
