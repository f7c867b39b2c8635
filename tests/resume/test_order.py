"""Which samples are whose: an epoch's order, and what is left of it, as arithmetic and on several ranks."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.resume.support import SIZES, WORLDS, distributed_loader, flat, ids, through_file


@settings(max_examples=40)
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


@settings(max_examples=40)
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
        assert done - position // (batch_size * world_size) in (0, 1)
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
