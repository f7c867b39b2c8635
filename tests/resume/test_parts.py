"""Data position, random numbers and uneven data without a trainer: arithmetic, loaders, collectives."""

from __future__ import annotations

import io
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_shard.errors import DataError
from lightning_shard.ranks import Ranks
from lightning_shard.resume import (
    agreed,
    agreeing,
    check_lengths,
    derived_rng_seed,
    order_warning,
    rank_share,
    rescale_batches,
    resumable,
    rng_state,
    seed_rng,
    set_rng_state,
    share_size,
    states_of_rank,
)
from tests.harness import run_distributed

SIZES = st.integers(1, 60)
WORLDS = st.integers(1, 5)


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def ids(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def through_file(state: Any) -> Any:
    """What a checkpoint makes of a state: it must load without running code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def distributed_loader(
    length: int, world_size: int, rank: int, *, batch_size: int = 2, epoch: int = 0, **options: Any
) -> Any:
    drop_last, drop_batch = options.pop("drop_last", False), options.pop("drop_batch", False)
    shuffle, seed = options.pop("shuffle", True), options.pop("seed", 3)
    dataset = Numbers(length)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    stock = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_batch, **options)
    loader = resumable(stock, world_size=world_size, rank=rank)
    loader.sampler.set_epoch(epoch)
    return loader


@given(SIZES, WORLDS, st.booleans(), st.integers(0, 5), st.booleans())
def test_share_of_a_whole_epoch_is_distributed_samplers(
    length: int, world_size: int, shuffle: bool, epoch: int, drop_last: bool
) -> None:
    samplers = [
        DistributedSampler(Numbers(length), world_size, rank, shuffle=shuffle, seed=1, drop_last=drop_last)
        for rank in range(world_size)
    ]
    single = DistributedSampler(Numbers(length), 1, 0, shuffle=shuffle, seed=1)
    for sampler in (*samplers, single):
        sampler.set_epoch(epoch)
    order = list(single)
    for rank, sampler in enumerate(samplers):
        assert rank_share(order, 0, rank, world_size, drop_last=drop_last) == list(sampler)


@given(st.data(), SIZES, WORLDS, st.booleans())
def test_share_of_the_rest_covers_it(data: st.DataObject, length: int, world_size: int, drop_last: bool) -> None:
    start = data.draw(st.integers(0, length))
    order = data.draw(st.permutations(range(length)))
    shares = [rank_share(order, start, rank, world_size, drop_last=drop_last) for rank in range(world_size)]
    size = share_size(length, start, world_size, drop_last=drop_last)
    assert [len(share) for share in shares] == [size] * world_size
    # Step by step, over the ranks: the global order again.
    merged = [share[i] for i in range(size) for share in shares]
    rest = order[start:]
    assert merged[: len(rest)] == rest[: size * world_size]
    if drop_last:
        assert 0 <= len(rest) - len(merged) < world_size
    else:
        assert 0 <= len(merged) - len(rest) < world_size


@given(st.data(), SIZES, WORLDS, st.integers(1, 4), st.booleans(), st.booleans())
def test_same_world_goes_on_with_the_very_batches(
    data: st.DataObject, length: int, world_size: int, batch_size: int, drop_last: bool, drop_batch: bool
) -> None:
    options = {"batch_size": batch_size, "epoch": 2, "drop_last": drop_last, "drop_batch": drop_batch}
    rank = data.draw(st.integers(0, world_size - 1))
    whole = ids(distributed_loader(length, world_size, rank, **options))
    seen = data.draw(st.integers(0, len(whole)))
    loader = distributed_loader(length, world_size, rank, **options)
    first = ids(itertools.islice(loader, seen))
    resumed = distributed_loader(length, world_size, rank, **(options | {"epoch": 0}))
    resumed.load_state_dict(through_file(loader.state_dict()))
    resumed.sampler.set_epoch(2 if seen < len(whole) else 3)
    assert len(resumed) == len(whole)
    assert resumed.batches_done == (seen if seen < len(whole) else 0)
    rest = ids(resumed)
    if seen < len(whole):
        assert first + rest == whole
        assert resumed.batches_done == len(whole)
    else:
        assert rest == ids(distributed_loader(length, world_size, rank, **(options | {"epoch": 3})))
    resumed.sampler.set_epoch(4)
    assert ids(resumed) == ids(distributed_loader(length, world_size, rank, **(options | {"epoch": 4})))


@settings(deadline=None)
@given(st.data(), SIZES, st.lists(WORLDS, min_size=2, max_size=4), st.booleans())
def test_worlds_in_turn_cover_the_epoch_once(
    data: st.DataObject, length: int, worlds: list[int], drop_last: bool
) -> None:
    """Some steps on each of several worlds, the last to the end: each sample once, but for padding or a cut tail."""
    order = list(distributed_loader(length, 1, 0, epoch=5).sampler)
    seen: list[int] = []
    state = None
    for turn, world_size in enumerate(worlds):
        batch_size = data.draw(st.integers(1, 3))
        options = {"batch_size": batch_size, "epoch": 5, "drop_last": drop_last}
        loaders = [distributed_loader(length, world_size, rank, **options) for rank in range(world_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        done = loaders[0].batches_done
        left = len(loaders[0]) - done
        position = state["samples"] if state else 0
        assert done - rescale_batches(position, batch_size, world_size) in (0, 1)
        last = turn == len(worlds) - 1
        steps = left if last else data.draw(st.integers(0, max(0, left - 1)))
        taken = [flat(ids(itertools.islice(loader, steps))) for loader in loaders]
        assert len({len(share) for share in taken}) == 1
        merged = [share[i] for i in range(len(taken[0])) for share in taken]
        assert merged[: length - position] == order[position : position + len(merged)]
        seen += merged
        states = [loader.state_dict() for loader in loaders]
        assert {state["samples"] for state in states} == {min(length, position + len(merged))}
        state = through_file(states[0])
        if left == 0:
            break
    counts = Counter(seen)
    if drop_last:
        assert max(counts.values(), default=1) == 1
        assert length - len(seen) < world_size
    else:
        assert set(counts) == set(range(length))
        assert len(seen) - length < world_size


STOCK = {
    "sequential": lambda: DataLoader(Numbers(11), 2),
    "shuffled": lambda: DataLoader(Numbers(11), 2, shuffle=True),
    "own generator": lambda: DataLoader(Numbers(11), 2, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "replacement": lambda: DataLoader(
        Numbers(11), 3, sampler=RandomSampler(Numbers(11), replacement=True, num_samples=40)
    ),
    "weighted": lambda: DataLoader(Numbers(11), 2, sampler=WeightedRandomSampler([1.0] * 11, 20)),
    "subset": lambda: DataLoader(Numbers(11), 2, sampler=SubsetRandomSampler(range(3, 11)), drop_last=True),
    "single samples": lambda: DataLoader(Numbers(7), None, shuffle=True),
    "list of batches": lambda: DataLoader(Numbers(11), batch_sampler=[[1, 2], [3], [4, 5, 6], [0, 7]]),
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
    "subclass": lambda: Doubling(Numbers(11), 2, shuffle=True),
}


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
    """What a loop over epochs sees, with a draw from each global generator per step; and its state at `stop`.

    `start` is the (epoch, batch) that the trainer is at; `stop` the one before which it is interrupted.
    """
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


@pytest.mark.parametrize("name", STOCK)
def test_iterates_as_the_stock_loader(name: str) -> None:
    seed_rng(5)
    stock, _ = train(STOCK[name](), 2)
    seed_rng(5)
    loader = resumable(STOCK[name](), world_size=1, rank=0)
    ours, _ = train(loader, 2)
    assert ours == stock
    assert len(loader) == len(STOCK[name]())
    assert isinstance(loader, DataLoader)
    assert order_warning(loader) is None


@pytest.mark.parametrize("stop", [(0, 1), (1, 0), (1, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_interrupted_is_uninterrupted(name: str, stop: tuple[int, int]) -> None:
    """Samples and the random numbers that the training draws after them, to the end of the next epoch."""

    def fresh() -> Any:
        return resumable(STOCK[name](), world_size=1, rank=0)

    seed_rng(5)
    whole, _ = train(fresh(), 3)
    seed_rng(5)
    first, (state, generators) = train(fresh(), 3, stop)
    seed_rng(99)
    resumed = fresh()
    resumed.load_state_dict(state)
    set_rng_state(generators)
    rest, _ = train(resumed, 3, start=(stop[0] + 1, 0) if state["finished"] and stop[1] else stop)
    assert len(first) > 0
    assert first + rest == whole


def test_interrupted_twice_in_one_epoch() -> None:
    seed_rng(5)
    whole = ids(resumable(STOCK["shuffled"](), world_size=1, rank=0))
    seed_rng(5)
    loader, seen = resumable(STOCK["shuffled"](), world_size=1, rank=0), []
    for _ in range(3):
        seen += ids(itertools.islice(loader, 2))
        state = loader.state_dict()
        seed_rng(1)
        loader = resumable(STOCK["shuffled"](), world_size=1, rank=0)
        loader.load_state_dict(state)
        assert loader.state_dict()["samples"] == state["samples"]
    assert seen == whole


def test_prefetched_by_workers_is_not_seen() -> None:
    loader = distributed_loader(40, 2, 0, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    next(iterator)
    assert loader.samples_seen == 4
    assert loader.state_dict()["batches"] == 1


def test_another_epoch_set_after_loading_starts_at_its_beginning() -> None:
    loader = distributed_loader(10, 2, 0, epoch=1)
    next(iter(loader))
    resumed = distributed_loader(10, 2, 0)
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(2)
    assert ids(resumed) == ids(distributed_loader(10, 2, 0, epoch=2))


def test_the_epoch_is_finished_in_the_order_of_its_seed() -> None:
    whole = ids(distributed_loader(10, 2, 0, seed=3))
    loader = distributed_loader(10, 2, 0, seed=3)
    next(iter(loader))
    resumed = distributed_loader(10, 2, 0, seed=8)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == whole[1:]
    assert ids(resumed) == ids(distributed_loader(10, 2, 0, seed=8))


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


class Backwards(DistributedSampler[Any]):
    """Deals out blocks instead of strides."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


def test_a_sampler_that_deals_otherwise_resumes_at_its_world_size_only() -> None:
    def loader(world_size: int) -> Any:
        sampler = Backwards(Numbers(12), world_size, 1)
        return resumable(DataLoader(Numbers(12), 2, sampler=sampler), world_size=world_size, rank=1)

    first = loader(2)
    next(iter(first))
    same, other = loader(2), loader(3)
    same.load_state_dict(first.state_dict())
    assert ids(same) == [[8, 9], [10, 11]]
    other.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match=r"on 2 processes and is resumed on 3.*Backwards"):
        next(iter(other))


@pytest.mark.parametrize(
    ("name", "world_size", "message"),
    [
        ("own batch sampler", 3, "on 2 processes and is resumed on 3"),
        ("shuffled", 1, "on 2 processes and is resumed on 1"),
        ("subset", 2, "epoch of 11 samples, and this loader's has 8"),
        ("wrapped", 2, "with a sampler of each process's own, and this loader has a distributed sampler"),
    ],
)
def test_an_epoch_that_can_not_be_finished_is_refused(name: str, world_size: int, message: str) -> None:
    origin = "shuffled" if name in ("subset", "wrapped") else name
    first = resumable(STOCK[origin](), world_size=2, rank=0)
    next(iter(first))
    state = first.state_dict()
    resumed = resumable(STOCK[name](), world_size=world_size, rank=0)
    with pytest.raises(DataError, match=message):
        resumed.load_state_dict(state)
    # At an epoch's end there is nothing to finish.
    resumed.load_state_dict(state | {"finished": True})
    assert len(ids(resumed)) == len(resumed)


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class StatefulStream(Stream):
    """Goes on where its state says, and starts anew after its end."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state.get("position", 0)


def test_iterable_without_state_is_left_alone_and_warned_of() -> None:
    stock = DataLoader(Stream(5), 2)
    assert resumable(stock, world_size=1, rank=0) is stock
    warning = order_warning(stock)
    assert warning is not None
    assert "Stream is iterable and has no state_dict" in warning
    in_workers = DataLoader(StatefulStream(5), 2, num_workers=1)
    assert resumable(in_workers, world_size=1, rank=0) is in_workers
    assert "num_workers=0" in str(order_warning(in_workers))
    assert order_warning([1, 2]) is not None
    unordered = resumable(DataLoader(Numbers(4), num_workers=2, in_order=False), world_size=1, rank=0)
    assert "in_order" in str(order_warning(unordered))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("used", range(4))
def test_iterable_with_state_goes_on_after_what_was_used(lookahead: int, used: int) -> None:
    loader = resumable(DataLoader(StatefulStream(7), 2), world_size=1, rank=0)
    assert order_warning(loader) is None
    assert loader.lookahead == 1
    loader.lookahead = lookahead
    iterator = iter(loader)
    seen = ids(itertools.islice(iterator, used + lookahead))[:used]
    resumed = resumable(DataLoader(StatefulStream(7), 2), world_size=1, rank=0)
    resumed.load_state_dict(through_file(loader.state_dict()))
    assert resumed.batches_done == used
    assert seen + ids(resumed) == [[0, 1], [2, 3], [4, 5], [6]]
    assert ids(resumed) == [[0, 1], [2, 3], [4, 5], [6]]


def test_iterable_to_its_end() -> None:
    loader = resumable(DataLoader(StatefulStream(4), 2), world_size=1, rank=0)
    list(loader)
    state = loader.state_dict()
    assert state["finished"]
    assert state["batches"] == 2
    resumed = resumable(DataLoader(StatefulStream(4), 2), world_size=2, rank=0)
    with pytest.warns(UserWarning, match="written by 1 processes.*resumed on 2"):
        resumed.load_state_dict(state)
    assert ids(resumed) == [[0, 1], [2, 3]]


def test_rng_state_survives_a_file() -> None:
    seed_rng(11)
    np.random.randn()  # leaves numpy with a cached second value
    random.gauss(0, 1)
    state = through_file(rng_state())

    def draws() -> Any:
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()

    first = draws()
    assert draws() != first
    set_rng_state(state)
    assert draws() == first


@given(st.integers(0, 2**63), st.integers(0, 4096), st.integers(0, 10**7))
def test_derived_seeds_are_fixed_and_differ(seed: int, rank: int, step: int) -> None:
    derived = derived_rng_seed(seed, rank, step)
    assert derived == derived_rng_seed(seed, rank, step)
    assert 0 <= derived < 2**32
    others = [derived_rng_seed(seed, rank + 1, step), derived_rng_seed(seed, rank, step + 1)]
    assert derived not in others
    seed_rng(derived)


def test_a_derived_seed_is_the_same_on_every_machine() -> None:
    # sha256("lightning_shard/1/2/3")[:4], little-endian
    assert derived_rng_seed(1, 2, 3) == 765159309


def _gather() -> Any:
    rank = dist.get_rank()
    states = Ranks.of().gather({"rank": rank})
    return states, states_of_rank(states, rank), states_of_rank(states, 5)


def test_states_of_all_ranks_are_kept() -> None:
    for rank, (states, own, new) in enumerate(run_distributed(_gather, 2)):
        assert states == [{"rank": 0}, {"rank": 1}]
        assert own == {"rank": rank}
        assert new == {"rank": 0}


def _check(lengths: list[int | None]) -> str | None:
    try:
        check_lengths(lengths[dist.get_rank()])
    except DataError as error:
        return str(error)
    return None


def test_different_lengths_are_refused_on_every_rank() -> None:
    assert run_distributed(_check, 2, [4, 4]) == [None, None]
    assert run_distributed(_check, 2, [None, None]) == [None, None]
    messages = run_distributed(_check, 2, [4, 3])
    assert messages[0] == messages[1]
    assert "rank 0: 4 batches\n  rank 1: 3 batches" in str(messages[0])
    assert "drop_last=True" in str(messages[0])
    assert "rank 1: no length" in str(run_distributed(_check, 2, [4, None])[1])


def _agree(lengths: list[int], *, wrap_loader: bool) -> tuple[list[int], list[str]]:
    length = lengths[dist.get_rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if wrap_loader:
            loader = agreeing(resumable(DataLoader(StatefulStream(length), None), world_size=2, rank=0))
            assert loader.state_dict()["batches"] == 0
            seen = [int(batch) for batch in loader]
        else:
            seen = list(agreed(iter(range(length)), what="stream"))
        # Nobody is left behind in a collective.
        dist.barrier()
    return seen, [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_uneven_streams_end_together_and_say_who_ran_out() -> None:
    assert run_distributed(_agree, 2, [3, 3], wrap_loader=False) == [([0, 1, 2], [])] * 2
    for seen, messages in run_distributed(_agree, 2, [5, 3], wrap_loader=False):
        assert seen == [0, 1, 2]
        assert len(messages) == 1
        assert "the stream ran out on rank 1 after 3 batches, rank 0 had more" in messages[0]
    for seen, messages in run_distributed(_agree, 2, [0, 2], wrap_loader=True):
        assert seen == []
        assert "ran out on rank 0 after 0 batches" in messages[0]


def _one_raises() -> str:
    def stream() -> Iterator[int]:
        yield 0
        if dist.get_rank() == 1:
            raise OSError("file is gone")
        yield 1

    try:
        for _ in agreed(stream()):
            pass
    except (DataError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_a_stream_that_raises_ends_all_ranks() -> None:
    first, second = run_distributed(_one_raises, 2)
    assert first.startswith("DataError: the training dataloader raised on rank 1 after 1 batches")
    assert second == "OSError: file is gone"


def test_agreement_is_not_needed_on_one_process() -> None:
    assert list(agreed(iter([1, 2]))) == [1, 2]
    check_lengths(3)
    assert Ranks.of().gather(3) == [3]
