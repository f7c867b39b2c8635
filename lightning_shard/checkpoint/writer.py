"""Writing torch.distributed.checkpoint files: the plan and the writer.

The files are those of torch's own ``FileSystemWriter`` (each item a ``torch.save`` of one box of a tensor), so that
torch's tools read them. What differs: a file is hashed while it is written, plain tensors that every rank has are
spread over the ranks, and at most one item is copied to the host at a time.

Anything with torch's checkpointable protocol (``torch/distributed/_checkpointable.py``) can stand for a tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.futures import Future

from lightning_shard.checkpoint.flat_shard import FlatTensor
from lightning_shard.checkpoint.layout import DATA_SUFFIX, METADATA, OPTIMIZER_PREFIX, FileEntry
from lightning_shard.errors import CheckpointError

DCP_VERSION = "1.0.0"


class HashedFile:
    """A new file that is hashed while it is written and synced when closed."""

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = open(path, "xb")  # noqa: SIM115 closed by __exit__
        self._hash = hashlib.sha256()
        self._size = 0
        self._failure: OSError | None = None

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            with self._stream:
                self._stream.flush()
                os.fsync(self._stream.fileno())
            return
        with contextlib.suppress(OSError):  # what is still buffered can't be written either
            self._stream.close()
        if self._failure is not None and error is not self._failure:
            # torch.save hides the cause: it goes on to end its archive and then complains about a wrong position.
            raise self._failure from error

    def write(self, data: Any) -> int:
        """Append bytes or a buffer."""
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._failure = self._failure or error
            raise
        self._hash.update(data)
        self._size += written
        return written

    def flush(self) -> None:
        """For ``torch.save``; the bytes reach the disk on close."""

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def entry(self) -> FileEntry:
        """Size and checksum of what was written."""
        return FileEntry(size=self._size, sha256=self._hash.hexdigest())


class TensorSavePlanner(DefaultSavePlanner):
    """Plans tensors alone, and gives each box of a tensor to one of the ranks that have it."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the tensors of this rank, unflattened: a key may hold dots."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: who writes what, and the checkpoint's metadata."""
        plans, metadata = create_default_global_save_plan(_write_once(all_plans, self._is_same_everywhere))
        errors = _validate_global_plan(plans, metadata) or _incomplete(metadata, self.state_dict)
        if errors:
            raise CheckpointError(f"the ranks' tensors do not make up whole ones: {'; '.join(errors[:5])}")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's part as rank 0 gave it."""
        return new_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's tensor for a planned box."""
        return find_tensor_shard(self.state_dict[index.fqn], index)

    def _is_same_everywhere(self, key: str) -> bool:
        # Buffers may differ between ranks (running statistics): there rank 0's count, as they do in DDP.
        return isinstance(self.state_dict.get(key), (nn.Parameter, FlatTensor)) or key.startswith(OPTIMIZER_PREFIX)


def _incomplete(metadata: Metadata, keys: Iterable[str]) -> list[str]:
    # torch looks neither for tensors that no rank has a part of, nor at the volume of scalars or on one rank.
    incomplete = []
    for key in keys:
        entry = metadata.state_dict_metadata.get(key)
        if entry is None:
            incomplete.append(f"no rank has a part of {key}")
        elif isinstance(entry, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if held != math.prod(entry.size):
                incomplete.append(f"the ranks have {held} elements of {key} of shape {tuple(entry.size)}")
    return incomplete


def _write_once(plans: list[SavePlan], may_spread: Callable[[str], bool]) -> list[SavePlan]:
    """Leave every box in one plan: that of the least loaded rank that has it, or of the lowest."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items.setdefault(item.index, item)
    load = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    # What only one rank can write comes first, then the largest: the rest evens the ranks out.
    order = sorted(items, key=lambda index: (len(holders[index]) > 1, -(items[index].tensor_storage_size() or 0)))
    for index in order:
        ranks = holders[index]
        chosen = min(ranks, key=lambda rank: load[rank]) if may_spread(index.fqn) else min(ranks)
        load[chosen] += items[index].tensor_storage_size() or 1
        writer[index] = chosen
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


class HashingWriter(FileSystemWriter):
    """Writes this rank's items into one file in an existing directory; ``files`` has what it wrote."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.files: dict[str, FileEntry] = {}

    def storage_meta(self) -> StorageMeta:
        """Nothing: no path of the machine that wrote it, no random number."""
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; the directory exists."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items one after the other, each copied to the host when its turn comes."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0{DATA_SUFFIX}"
            with HashedFile(self.directory / name) as stream:
                for item in plan.items:
                    start = stream.tell()
                    torch.save(_row_major(item, planner), cast(BinaryIO, stream))
                    length = stream.tell() - start
                    info = _StorageInfo(name, start, length)
                    results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
            self.files[name] = stream.entry()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write ``.metadata``."""
        metadata.version = DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        with HashedFile(self.directory / METADATA) as stream:
            pickle.dump(metadata, stream)
        self.files[METADATA] = stream.entry()


def _row_major(item: WriteItem, planner: SavePlanner) -> Tensor:
    """A host tensor with the item's values in row-major order and a storage of no more than them."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), item.index
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor
