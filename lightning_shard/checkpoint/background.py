"""The saves of a run, one after the other, of which the last may still be written while training goes on.

A save in the background blocks its caller for the plan, kept from the save before while shards stay, and for copying
this rank's boxes to the host. The rest is the code of any other save, over a process group of its own, in a thread:
hashing, writing and syncing keep no interpreter lock, and steps were measured to take as long beside a process, which
costs a second interpreter with torch for each rank, and shared memory, which is not pinned.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils.serialization import config as serialization

from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.commit import BackgroundWrite
from lightning_shard.checkpoint.files.location import AnyPath
from lightning_shard.checkpoint.files.manifest import Contents
from lightning_shard.checkpoint.files.tensor_files import Values
from lightning_shard.checkpoint.foreign.hugging_face import Skeleton
from lightning_shard.checkpoint.plan import Plans, live_values
from lightning_shard.checkpoint.save import begin_any
from lightning_shard.cluster.preemption import DelayedMax
from lightning_shard.ranks import Ranks

Collect = Callable[[], Contents]

# What a rank says of its write ahead of each step; the largest is what all say. 0 is none of them: said by nobody yet.
_ENDED, _GOES_ON = 1, 2


@dataclass(frozen=True, kw_only=True)
class _Ongoing:
    path: AnyPath  # As it was given, the same on every rank.
    write: BackgroundWrite
    outcome: DelayedMax
    links: set[str] = field(default_factory=set)  # Names that become links to it.


class Saver:
    """Saves the checkpoints of one run. All ranks call each method in the same order, but where it says otherwise."""

    def __init__(self) -> None:
        self._plans, self._buffers = Plans(), HostBuffers()
        self._ongoing: _Ongoing | None = None
        self._longest_seconds = 0.0

    def save(
        self, path: AnyPath, collect: Collect, *, background: bool, wanted: Callable[[], Skeleton] | None = None
    ) -> None:
        """Save to ``path`` in the form that its name says, both the same on every rank, once an earlier save is
        complete. ``collect`` gives what is saved, without communication; ``background``: return as soon as the tensors
        may change. CheckpointError, the same on every rank, also for an earlier save that failed in the background.
        """
        self.finish()
        started = time.monotonic()
        ranks, writing = Ranks.of(), Ranks.in_background() if background else None
        begun = begin_any(ranks, path, collect, self._plans, wanted)
        live = live_values(begun.state.tensors)
        if writing is None:
            # torch's own checksums of each record cost as much as ours. The setting holds for the whole process, so
            # that a background save leaves it: other code may call torch.save meanwhile.
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                begun.finish(ranks, live)
            self._note(started)
            return
        try:
            values = self._buffers.copy(begun.plan.mine, live)
        except Exception as error:
            failure = error

            def values(index: MetadataIndex) -> Tensor:
                raise failure  # in the thread, where the other ranks learn of it

        def work(write: BackgroundWrite) -> None:
            begun.finish(writing, values)
            writing.first(f"removing what {begun.target} replaces", write.completed)
            self._buffers.pin()
            self._note(started)

        self._ongoing = _Ongoing(path=path, write=BackgroundWrite(work), outcome=DelayedMax(ranks.group))

    def _note(self, started: float) -> None:
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)

    @property
    def reserve_seconds(self) -> float:
        """How long a save from now on may take: as long as the longest so far, behind the one that goes on."""
        return self._longest_seconds * (1 if self._ongoing is None else 2)

    @property
    def is_busy(self) -> bool:
        """Whether a save goes on in the background, as all ranks were told at one and the same step."""
        return self._ongoing is not None

    def is_writing(self, path: str | os.PathLike[str]) -> bool:
        """Whether the checkpoint at ``path``, or of that link, is still being written, as far as this rank was told."""
        names = [] if self._ongoing is None else [str(self._ongoing.path), *self._ongoing.links]
        return os.path.normpath(path) in map(os.path.normpath, names)

    def look(self) -> None:
        """`finish` ahead of a step if it has ended on all ranks, which learn of it in the same step. No rank waits."""
        if self._ongoing is None:
            return
        own = _GOES_ON if self._ongoing.write.thread.is_alive() else _ENDED
        if self._ongoing.outcome(own) == _ENDED:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in the background; CheckpointError, the same on every rank: it has failed."""
        if self._ongoing is not None:
            self._ongoing.outcome.wait_for_largest()
        failure = self.wait()
        if failure is not None:
            raise failure

    def wait(self) -> BaseException | None:
        """Wait for the save in the background; its error, if it failed. No communication: any rank may call it."""
        ongoing, self._ongoing = self._ongoing, None
        return None if ongoing is None else ongoing.write.wait()

    def close(self) -> BaseException | None:
        """`wait`, and give the memory for copies back."""
        failure = self.wait()
        self._buffers = HostBuffers()
        return failure

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint once the one that is being written is complete, else never. Rank 0 acts."""
        self._when_complete(partial(commit.remove, path))

    def link(self, path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
        """Make ``name`` a link to the checkpoint at ``path``, once that is complete. Rank 0 acts."""
        if self._ongoing is not None:
            self._ongoing.links.add(os.fspath(name))
        self._when_complete(partial(commit.link, path, name))

    def _when_complete(self, act: Callable[[], None]) -> None:
        if not Ranks.of().is_first:
            return
        if self._ongoing is None:
            act()
        else:
            self._ongoing.write.when_complete(act)


class HostBuffers:
    """Memory for one copy of the boxes that a rank writes, kept from one save to the next.

    Copies of boxes on a device are in pinned memory, so that all copies run at once. Pinning takes about as long as a
    copy, so that it is left to `pin`, which the thread of the first save calls once it has written. Boxes that lie in
    files are copied to files.
    """

    def __init__(self) -> None:
        self.kept: dict[MetadataIndex, Tensor] = {}
        self._on_device: set[MetadataIndex] = set()

    @torch.no_grad()
    def copy(self, boxes: Sequence[MetadataIndex], values: Values) -> Values:
        """Copy ``boxes`` and give the copies, which stay as they are until the next call; devices are waited for."""
        sources = {index: values(index) for index in boxes}
        wanted = {index: (source.shape, source.dtype) for index, source in sources.items()}
        # Memory of other boxes is free before more is taken.
        self.kept = {i: b for i, b in self.kept.items() if (b.shape, b.dtype) == wanted.get(i)}
        self._on_device = {index for index, source in sources.items() if source.device.type != "cpu"}
        for index, source in sources.items():
            if index not in self.kept:
                self.kept[index] = _new_buffer(source)
            self.kept[index].copy_(source, non_blocking=True)
        for device in {sources[index].device for index in self._on_device}:
            torch.accelerator.current_stream(device).synchronize()
        return self.kept.__getitem__

    def pin(self) -> None:
        """Put pinned memory in place of the copies of boxes on a device, whose values are gone then."""
        pageable = {index for index in self._on_device if not self.kept[index].is_pinned()}
        if pageable and torch.accelerator.is_available():
            like = [torch.empty_like(self.kept[index], device="meta") for index in self._on_device]
            for index in self._on_device:  # Free before more is taken.
                del self.kept[index]
            with suppress(RuntimeError):  # Without memory to pin the next save makes pageable copies again.
                self.kept.update(zip(self._on_device, pinned_like(like), strict=True))


_SLAB, _ALIGNMENT = 2**28, 512  # bytes


def pinned_like(sources: Sequence[Tensor]) -> list[Tensor]:
    """Pinned memory for a copy of each tensor: many in a slab of a power of two, or one that is larger alone."""
    places: list[tuple[int, int]] = []  # slab and offset
    ends: list[int] = []
    for source in sources:
        if not ends or ends[-1] + source.nbytes > _SLAB:
            ends.append(0)
        places.append((len(ends) - 1, ends[-1]))
        ends[-1] += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    slabs = [torch.empty(end, dtype=torch.uint8, pin_memory=torch.accelerator.is_available()) for end in ends]
    return [
        slabs[slab][offset : offset + source.nbytes].view(source.dtype).view(source.shape)
        for source, (slab, offset) in zip(sources, places, strict=True)
    ]


def _new_buffer(source: Tensor) -> Tensor:
    name = source.untyped_storage().filename if source.device.type == "cpu" else None
    if name is None or source.numel() == 0:
        return torch.empty(source.shape, dtype=source.dtype)
    handle, path = tempfile.mkstemp(prefix=".staged-", dir=Path(name).parent)
    os.close(handle)
    try:
        flat = torch.from_file(path, shared=True, size=source.numel(), dtype=source.dtype)
    finally:
        os.unlink(path)  # mapped, the file lives until the memory is given back or the process ends
    return flat.view(source.shape)
