"""What samplers and datasets keep goes on by their ``state_dict``, or that it does not is said."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader

from lightning_shard.resume.wrap import resumable
from tests.resume.support import InPlaceOwn, Numbers, NumpyOwn, ids, through_file


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(NumpyOwn, ".rng"), (InPlaceOwn, None)],
)
@pytest.mark.parametrize("dealt", [False, True])
def test_a_sampler_that_keeps_something_is_said(kind: Any, kept: str | None, dealt: bool) -> None:
    """Once by a generator that it has, and in mid-epoch by an order that is another one."""

    def fresh() -> Any:
        own = kind()
        wrapped = DistributedSamplerWrapper(own, num_replicas=2, rank=0, shuffle=False) if dealt else own
        stock = DataLoader(Numbers(11), 2, sampler=wrapped)
        return resumable(stock, world_size=1 + dealt, rank=0, inner_sampler=own if dealt else None)

    loader = fresh()
    ids(loader)
    ends = through_file(loader.state_dict())
    next(iter(loader))
    state = through_file(loader.state_dict())
    for each, midway in ((ends, False), (state, True)):
        resumed = fresh()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed.load_state_dict(each)
            ids(resumed)
        said = [str(warning.message) for warning in caught]
        keeps = [text for text in said if f"in {kind.__name__}{kept} is in no checkpoint" in text]
        differs = [text for text in said if "gives another order than before the checkpoint" in text]
        assert len(keeps) == (kept is not None)
        assert len(differs) == midway
        assert len(said) == len(keeps) + len(differs)


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
