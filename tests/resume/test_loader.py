"""Loaders of every kind go on in mid-epoch, with and without workers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_shard.errors import DataError
from lightning_shard.resume.rng import rng_state, seed_rng, set_rng_state
from lightning_shard.resume.wrap import order_warning, resumable
from tests.resume.support import (
    Numbers,
    PositionState,
    SeededState,
    YieldedState,
    ids,
    through_file,
)

STOCK = {
    "sequential": lambda: DataLoader(Numbers(11), 2),
    "shuffled": lambda: DataLoader(Numbers(11), 2, shuffle=True),
    "own generator": lambda: DataLoader(Numbers(11), 2, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "weighted": lambda: DataLoader(Numbers(11), 2, sampler=WeightedRandomSampler([1.0] * 11, 20)),
    "subset": lambda: DataLoader(Numbers(11), 2, sampler=SubsetRandomSampler(range(3, 11)), drop_last=True),
    "single samples": lambda: DataLoader(Numbers(7), None, shuffle=True),
    "batches as samples": lambda: DataLoader(
        Numbers(11), None, sampler=BatchSampler(DistributedSampler(Numbers(11), num_replicas=2, rank=1), 2, False)
    ),
    "own batch sampler": lambda: DataLoader(Numbers(11), batch_sampler=Growing(RandomSampler(Numbers(11)))),
    "numpy sampler": lambda: DataLoader(Numbers(11), 2, sampler=NumpyShuffle(11)),
    "wrapped": lambda: DataLoader(
        Numbers(11),
        2,
        sampler=DistributedSamplerWrapper(
            WeightedRandomSampler([1.0] * 11, 12), num_replicas=2, rank=1, shuffle=True, seed=1
        ),
    ),
    "workers": lambda: DataLoader(Numbers(11), 2, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(Numbers(11), 2, shuffle=True, num_workers=1, persistent_workers=True),
    **{
        f"{kind.__name__}, {workers} workers": lambda kind=kind, workers=workers: DataLoader(
            Numbers(11), 2, sampler=kind(), num_workers=workers
        )
        for kind, workers in ((SeededState, 1), (PositionState, 0), (YieldedState, 0))
    },
    "batches with a state": lambda: DataLoader(Numbers(11), batch_sampler=Pairs(PositionState(), 2, False)),
    "subclass": lambda: Doubling(Numbers(11), 2, shuffle=True),
}


class Pairs(BatchSampler):
    """A batch sampler of its own kind."""


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for size in range(1, 5):
            yield [indices.pop() for _ in range(size)]

    def __len__(self) -> int:
        return 4


class NumpyShuffle(Sampler[int]):
    """Draws from numpy's and python's global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        order = [int(i) for i in np.random.permutation(self.length)]
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.length


class Doubling(DataLoader[Any]):
    """A user's subclass, whose iterator is a generator."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * 2


def train(loader: Any, epochs: int, stop: tuple[int, int] | None = None, start: tuple[int, int] = (0, 0)) -> Any:
    """What a loop over epochs sees, with a draw from each global generator per step; and its state at `stop`."""
    seen: list[Any] = []
    for epoch in range(start[0], epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        batch_index = start[1] if epoch == start[0] else 0
        iterator = iter(loader)
        while True:
            if (epoch, batch_index) == stop:
                return seen, (through_file(loader.state_dict()), through_file(rng_state()))
            try:
                batch = next(iterator)
            except StopIteration:
                break
            noise = (torch.rand(()).item(), float(np.random.rand()), random.random())
            seen.append((epoch, batch_index, batch.tolist(), noise))
            batch_index += 1
    return seen, None


@pytest.mark.parametrize("stop", [pytest.param((0, 1), marks=pytest.mark.matrix), (1, 2)], ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_interrupted_is_the_stock_loader_uninterrupted(name: str, stop: tuple[int, int]) -> None:
    """Samples and the random numbers that the training draws after them, to the end of the next epoch."""

    def fresh() -> Any:
        return resumable(STOCK[name](), world_size=1, rank=0)

    seed_rng(5)
    whole, _ = train(STOCK[name](), 3)
    seed_rng(5)
    first, (state, generators) = train(fresh(), 3, stop)
    seed_rng(99)
    resumed = fresh()
    assert len(resumed) == len(STOCK[name]())
    assert isinstance(resumed, DataLoader)
    assert order_warning(resumed) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
    set_rng_state(generators)
    rest, _ = train(resumed, 3, start=(stop[0] + 1, 0) if state["finished"] and stop[1] else stop)
    assert len(first) > 0
    assert first + rest == whole


@pytest.mark.parametrize("other", [{"seed": 8}], ids=str)
def test_the_epoch_is_finished_in_the_order_in_which_it_was_begun(other: dict[str, Any]) -> None:
    def loader(seed: int = 3, shuffle: bool = True, kind: Any = BatchSampler) -> Any:
        sampler = DistributedSampler(Numbers(10), 2, 0, shuffle=shuffle, seed=seed)
        stock = DataLoader(Numbers(10), batch_sampler=kind(sampler, 2, False))
        return resumable(stock, world_size=2, rank=0)

    first, whole = loader(), ids(loader())
    next(iter(first))
    resumed = loader(**other)
    [(name, value)] = other.items()
    with pytest.warns(UserWarning, match=f"is of {name} (3|True) in the checkpoint, and of {value} here"):
        resumed.load_state_dict(first.state_dict())
    assert ids(resumed) == whole[1:]
    assert ids(resumed) == ids(loader(**other)) != whole
    first = loader(kind=Pairs)
    next(iter(first))
    with pytest.raises(DataError, match=f"its {name} was 3 and is {value}"):
        loader(**other, kind=Pairs).load_state_dict(first.state_dict())


def test_what_frameworks_read_and_set_reaches_the_loader() -> None:
    sampler = DistributedSampler(Numbers(8), 2, 0)
    stock = DataLoader(Numbers(8), 2, sampler=sampler, num_workers=2, persistent_workers=True)
    loader = resumable(stock, world_size=2, rank=0)
    assert loader.sampler is sampler
    assert loader.batch_sampler.sampler is sampler
    assert type(loader.batch_sampler) is BatchSampler
    assert (loader.num_workers, loader.batch_size, loader.dataset) == (2, 2, stock.dataset)
    assert loader.multiprocessing_context is None
    init = print
    loader.worker_init_fn = init
    assert loader._inner.worker_init_fn is init
    next(iter(loader))
    assert loader._iterator is not None
    loader._iterator = None
    assert loader._inner._iterator is None
    assert resumable(loader, world_size=2, rank=0) is loader


@pytest.mark.parametrize("kind", [SeededState, PositionState])
@pytest.mark.parametrize("stop", [(1, 0), (2, 2)], ids=str)
def test_a_sampler_that_is_dealt_out_keeps_its_state(kind: Any, stop: tuple[int, int]) -> None:
    """As Lightning deals one out: the ranks' shares of what it gives."""

    def fresh() -> Any:
        own = kind()
        dealt = DistributedSamplerWrapper(own, num_replicas=2, rank=1, shuffle=False)
        return resumable(DataLoader(Numbers(11), 2, sampler=dealt), world_size=2, rank=1, inner_sampler=own)

    whole, _ = train(fresh(), 4)
    seed_rng(5)
    first, (state, generators) = train(fresh(), 4, stop)
    resumed = fresh()
    resumed.load_state_dict(state)
    set_rng_state(generators)
    rest, _ = train(resumed, 4, start=(stop[0] + 1, 0) if state["finished"] and stop[1] else stop)
    assert [step[:3] for step in first + rest] == [step[:3] for step in whole]


class Backwards(DistributedSampler[Any]):
    """Deals out blocks instead of strides."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


def test_a_sampler_that_deals_otherwise_resumes_at_its_world_size_only() -> None:
    samplers = [Backwards(Numbers(12), ranks, 1) for ranks in (2, 2, 3)]
    loaders = [DataLoader(Numbers(12), 2, sampler=sampler) for sampler in samplers]
    first, same, other = (resumable(each, world_size=each.sampler.num_replicas, rank=1) for each in loaders)
    next(iter(first))
    same.load_state_dict(first.state_dict())
    assert ids(same) == [[8, 9], [10, 11]]
    with pytest.raises(DataError, match="its length was 6 and is 4"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("name", "world_size", "message"),
    [
        ("own batch sampler", 3, "its number of processes was 2 and is 3"),
        ("subset", 2, "its length was 11 and is 8"),
        ("wrapped", 2, "its sampler was a sampler of each process's own and is a distributed sampler"),
    ],
)
def test_an_epoch_that_can_not_be_finished_is_refused(name: str, world_size: int, message: str) -> None:
    origin = "shuffled" if name in ("subset", "wrapped") else name
    first, resumed = (resumable(STOCK[k](), world_size=n, rank=0) for k, n in ((origin, 2), (name, world_size)))
    next(iter(first))
    state = first.state_dict()
    with pytest.raises(DataError, match=message):
        resumed.load_state_dict(state)
    # At an epoch's end there is nothing to finish.
    resumed.load_state_dict(state | {"finished": True})
    assert len(ids(resumed)) == len(resumed)
