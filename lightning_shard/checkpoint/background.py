"""The saves of a run, one after the other, of which the last may still be written while training goes on.

A save in the background blocks its caller for the plan, which is that of the save before as long as nothing is cut in
another way, and for copying this rank's boxes to the host. The rest is the code of any other save, in a thread and
over a process group of its own.

A thread and not a process: what takes the time of a save, hashing, writing and syncing, holds no interpreter lock.
Beside 200 MB in 100 boxes, on two CPU cores, steps of small operations took as long with a thread as with a process
(medians of 11 and 10 ms), steps of matrix products too (107 and 130 ms, both with a spread of three times that), and
the write did as well (0.8 s). A process costs a second interpreter with torch in it for each rank, and shared memory,
which is not pinned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.collect import State
from lightning_shard.checkpoint.full import begin_full, names_full
from lightning_shard.checkpoint.plan import Plans, live_values
from lightning_shard.checkpoint.save import begin
from lightning_shard.checkpoint.staging import HostBuffers
from lightning_shard.checkpoint.under_way import Write
from lightning_shard.cluster.preemption import Agreement
from lightning_shard.ranks import Ranks

# What a rank says of its write ahead of each step; the largest is what all say. 0 is none of them: said by nobody yet.
_ENDED, _GOES_ON = 1, 2


@dataclass(frozen=True, kw_only=True)
class _UnderWay:
    path: str
    """As it was given, the same on every rank."""

    write: Write
    outcome: Agreement


class Saver:
    """Saves the checkpoints of one run. All ranks call each method alike, but where it says otherwise."""

    def __init__(self) -> None:
        self._plans = Plans()
        self._buffers = HostBuffers()
        self._under_way: _UnderWay | None = None
        self._longest_seconds = 0.0

    def save(self, path: str, collect: Callable[[], State], *, background: bool) -> None:
        """Save to ``path``, the same on every rank; one that `names_full` becomes a stock Lightning file.

        What is still being written is waited for first.

        Args:
            path: where the checkpoint is to be.
            collect: gives what is to be saved, without communication.
            background: return as soon as the tensors may change.

        Raises:
            CheckpointError: on every rank alike, also for a save before that failed in the background.
        """
        self.finish()
        started = time.monotonic()
        ranks, writing = Ranks.of(), Ranks.in_background() if background else None
        begun, state = (begin_full if names_full(path) else begin)(ranks, path, collect, self._plans)
        live = live_values(state.tensors)
        if writing is None:
            begun.finish(ranks, live)
            self._note(started)
            return
        try:
            values = self._buffers.copy(begun.plan.mine, live)
        except Exception as error:
            values = partial(_fail, error)  # in the thread, where the other ranks learn of it

        def work(write: Write) -> None:
            begun.finish(writing, values)
            writing.first(f"removing what {begun.target} replaces", write.tidy)
            self._note(started)

        self._under_way = _UnderWay(path=path, write=Write(work), outcome=Agreement(ranks.group))

    def _note(self, started: float) -> None:
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)

    @property
    def reserve_seconds(self) -> float:
        """How long a save from now on may take: as long as the longest so far, behind the one that is under way."""
        return self._longest_seconds * (1 if self._under_way is None else 2)

    def is_writing(self, path: str | os.PathLike[str]) -> bool:
        """Whether the checkpoint at ``path`` is still being written, as far as this rank was told."""
        return self._under_way is not None and os.path.normpath(self._under_way.path) == os.path.normpath(path)

    def look(self) -> None:
        """See how the save in the background stands, ahead of a step. No rank waits for another.

        Raises:
            CheckpointError: it has failed; on every rank alike and in the same step.
        """
        if self._under_way is None:
            return
        own = _ENDED if self._under_way.write.has_ended else _GOES_ON
        if self._under_way.outcome(own) == _ENDED:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it has failed; on every rank alike.
        """
        if self._under_way is not None:
            self._under_way.outcome.finish()
        failure = self.wait()
        if failure is not None:
            raise failure

    def wait(self) -> BaseException | None:
        """Wait for the save in the background; what it failed of. No communication: any rank may call it."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.write.wait()

    def close(self) -> BaseException | None:
        """`wait`, and give the memory for copies back."""
        failure = self.wait()
        self._buffers.free()
        return failure

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, once the one that is being written is whole. Rank 0 calls it.

        If that does not become whole, what was to be deleted stays.
        """
        self._once_whole(partial(commit.remove, path))

    def link(self, path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
        """Make ``name`` a link to the checkpoint at ``path``, once that is whole. Rank 0 calls it."""
        self._once_whole(partial(commit.link, path, name))

    def _once_whole(self, act: Callable[[], None]) -> None:
        if self._under_way is None:
            act()
        else:
            self._under_way.write.afterwards(act)


def _fail(error: Exception, _: MetadataIndex) -> Tensor:
    raise error
