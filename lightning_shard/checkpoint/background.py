"""The saves of a run, one after another. The last one may still be written while training goes on.

A save in the background blocks its caller for the plan, which is kept while shards stay, and for copying this rank's
boxes to the host. A thread does the rest, with the code of any other save and a process group of its own. A thread is
enough: hashing, writing and syncing release the interpreter lock, and steps were measured to take as long with a
process. A process would cost a second interpreter with torch for each rank, and shared memory is not pinned.
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
from lightning_shard.checkpoint.files.tensor_files import ReadBox
from lightning_shard.checkpoint.foreign.hugging_face_folders import Skeleton
from lightning_shard.checkpoint.save import prepare_save
from lightning_shard.checkpoint.save_plan import SavePlanner, live_values
from lightning_shard.cluster.preemption import DelayedMax
from lightning_shard.ranks import Ranks

# The state of its write that a rank reports before each step. The group takes the largest. 0 means no report yet.
_ENDED, _GOES_ON = 1, 2


@dataclass(frozen=True, kw_only=True)
class _Ongoing:
    path: AnyPath  # as it was given, the same on every rank
    write: BackgroundWrite
    outcome: DelayedMax
    links: set[str] = field(default_factory=set)  # names that become links to it


class Saver:
    """Saves the checkpoints of one run. Unless said otherwise, all ranks call each method in the same order."""

    def __init__(self) -> None:
        self._planner, self._buffers = SavePlanner(), HostBuffers()
        self._ongoing: _Ongoing | None = None
        self._longest_seconds = 0.0

    def save(
        self,
        path: AnyPath,
        collect: Callable[[], Contents],
        *,
        background: bool,
        make_skeleton: Callable[[], Skeleton] | None = None,
    ) -> None:
        """Save to ``path``, the same on every rank, in the form that its name says. An earlier save is waited for.

        ``collect`` returns the contents without communication. ``background``: return as soon as the tensors may
        change. CheckpointError, the same on every rank, also for an earlier save that failed in the background.
        """
        self.finish_background_save()
        started = time.monotonic()
        ranks, writing = Ranks.of(), Ranks.in_background() if background else None
        pending = prepare_save(ranks, path, collect, self._planner, make_skeleton)
        live = live_values(pending.contents.tensors)
        if writing is None:
            # torch's own checksums of each record cost as much as ours. A background save leaves the setting alone: it
            # holds for the whole process, and other code may call torch.save meanwhile.
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                pending.write(ranks, live)
            self._note_duration(started)
            return
        try:
            values = self._buffers.copy(pending.plan.mine, live)
        except Exception as error:
            failure = error

            def values(index: MetadataIndex) -> Tensor:
                raise failure  # in the thread, which tells the other ranks

        def work(write: BackgroundWrite) -> None:
            pending.write(writing, values)
            writing.first(f"deleting checkpoints that {pending.target} replaces", write.mark_complete)
            self._buffers.pin()
            self._note_duration(started)

        self._ongoing = _Ongoing(path=path, write=BackgroundWrite(work), outcome=DelayedMax(ranks.group))

    def _note_duration(self, started: float) -> None:
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)

    @property
    def reserve_seconds(self) -> float:
        """Upper estimate of a save's duration: the longest so far, twice if another one has to end first."""
        return self._longest_seconds * (1 if self._ongoing is None else 2)

    @property
    def is_busy(self) -> bool:
        """True while a save goes on in the background. All ranks learn of its end at the same step."""
        return self._ongoing is not None

    def is_writing(self, path: str | os.PathLike[str]) -> bool:
        """True while the checkpoint at ``path``, or at the target of that link, is not known to be complete."""
        names = [] if self._ongoing is None else [str(self._ongoing.path), *self._ongoing.links]
        return os.path.normpath(path) in map(os.path.normpath, names)

    def poll_background_save(self) -> None:
        """Before a step, call `finish_background_save` if the save has ended on all ranks. No rank waits."""
        if self._ongoing is None:
            return
        own = _GOES_ON if self._ongoing.write.thread.is_alive() else _ENDED
        if self._ongoing.outcome(own) == _ENDED:
            self.finish_background_save()

    def finish_background_save(self) -> None:
        """Wait for the save in the background. CheckpointError, the same on every rank, if it failed."""
        if self._ongoing is not None:
            self._ongoing.outcome.wait_for_largest()
        failure = self._wait()
        if failure is not None:
            raise failure

    def _wait(self) -> BaseException | None:
        ongoing, self._ongoing = self._ongoing, None
        return None if ongoing is None else ongoing.write.wait()

    def free_buffers(self) -> BaseException | None:
        """Wait for the save in the background, free the memory of its copies and return its error. No communication:
        any rank may call it.
        """
        failure = self._wait()
        self._buffers = HostBuffers()
        return failure

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint once the save in the background is complete. Never, if that fails. Rank 0 acts."""
        self._when_complete(partial(commit.remove_checkpoint, path))

    def link_checkpoint(self, path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
        """Make ``name`` a link to the checkpoint at ``path``, once that is complete. Rank 0 acts."""
        if self._ongoing is not None:
            self._ongoing.links.add(os.fspath(name))
        self._when_complete(partial(commit.link_checkpoint, path, name))

    def _when_complete(self, act: Callable[[], None]) -> None:
        if not Ranks.of().is_first:
            return
        if self._ongoing is None:
            act()
        else:
            self._ongoing.write.when_complete(act)


class HostBuffers:
    """Host memory for one copy of the boxes that a rank writes, kept from one save to the next.

    Copies of boxes on a device are in pinned memory, so that all copies run at once. Pinning takes about as long as a
    copy. So it is left to `pin`, which the thread of the first save calls after writing. Boxes that are mapped from
    files are copied to files.
    """

    def __init__(self) -> None:
        self.kept: dict[MetadataIndex, Tensor] = {}
        self._on_device: set[MetadataIndex] = set()

    @torch.no_grad()
    def copy(self, boxes: Sequence[MetadataIndex], values: ReadBox) -> ReadBox:
        """Copy ``boxes``, wait for the devices and return a reader of the copies. They stay until the next call."""
        sources = {index: values(index) for index in boxes}
        wanted = {index: (source.shape, source.dtype) for index, source in sources.items()}
        # Free the memory of other boxes before taking more.
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
        """Replace the copies of boxes on a device by pinned memory. Their values are lost."""
        pageable = {index for index in self._on_device if not self.kept[index].is_pinned()}
        if pageable and torch.accelerator.is_available():
            like = [torch.empty_like(self.kept[index], device="meta") for index in self._on_device]
            for index in self._on_device:  # free before taking more
                del self.kept[index]
            with suppress(RuntimeError):  # without memory to pin, the next save makes pageable copies again
                self.kept.update(zip(self._on_device, pinned_like(like), strict=True))


_SLAB, _ALIGNMENT = 2**28, 512  # bytes


def pinned_like(sources: Sequence[Tensor]) -> list[Tensor]:
    """Allocate pinned memory for a copy of each tensor: many share a slab, a tensor larger than a slab has its own."""
    places: list[tuple[int, int]] = []  # slab and offset in it
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
        os.unlink(path)  # the mapping keeps the file until the memory is freed
    return flat.view(source.shape)
