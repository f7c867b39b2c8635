"""Uneven data: streams end together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
)

from lightning_shard.errors import DataError
from lightning_shard.resume.wrap import resumable, stop_together, stop_together_loader
from tests.harness import run_distributed
from tests.resume.support import StatefulStream


def _agree(lengths: list[int], *, wrap_loader: bool) -> tuple[list[int], list[str]]:
    length = lengths[dist.get_rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if wrap_loader:
            loader = stop_together_loader(resumable(DataLoader(StatefulStream(length), None), world_size=2, rank=0))
            assert loader.state_dict()["batches"] == 0
            seen = [int(batch) for batch in loader]
        else:
            seen = list(stop_together(iter(range(length)), name="stream"))
        # Nobody is left behind in a collective.
        dist.barrier()
    return seen, [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_uneven_streams_end_together_and_say_who_ran_out() -> None:
    for seen, messages in run_distributed(_agree, 2, [5, 3], wrap_loader=False):
        assert seen == [0, 1, 2]
        assert len(messages) == 1
        assert "the stream ran out on rank 1 of 2 after 3 batches" in messages[0]
    for seen, messages in run_distributed(_agree, 2, [0, 2], wrap_loader=True):
        assert seen == []
        assert "ran out on rank 0 of 2 after 0 batches" in messages[0]


def _one_raises() -> str:
    def stream() -> Iterator[int]:
        yield 0
        if dist.get_rank() == 1:
            raise OSError("file is gone")
        yield 1

    try:
        for _ in stop_together(stream()):
            pass
    except (DataError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_a_stream_that_raises_ends_all_ranks() -> None:
    first, second = run_distributed(_one_raises, 2)
    assert first.startswith("DataError: the training dataloader raised on rank 1 after 1 batches")
    assert second == "OSError: file is gone"
