"""Reading boxes of tensors from torch.distributed.checkpoint files, into live tensors and in place.

Anything with torch's checkpointable protocol (``torch/distributed/_checkpointable.py``) can stand for a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
)
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view, find_tensor_shard
from torch.futures import Future

from lightning_shard.errors import CheckpointCorruptError


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans the reads into this rank's tensors, whole or in part, in place."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the tensors of this rank, unflattened: a key may hold dots."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The boxes to read; no rank needs to know those of the others."""
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """This rank's tensor for a planned box."""
        return find_tensor_shard(self.state_dict[index.fqn], index)


class CheckedReader(FileSystemReader):
    """Reads boxes of tensors whose metadata was checked beforehand, and nothing else."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self.directory = directory
        self.metadata = metadata
        self.storage_data = metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that was checked; the file is not opened."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each file front to back, each stored box once, and copy (casting) into the tensors."""
        for name, items in _by_file(plan.items, self.storage_data).items():
            with open(self.directory / name, "rb") as stream:
                held: tuple[MetadataIndex, Tensor] | None = None
                for item in items:
                    if held is None or held[0] != item.storage_index:
                        held = None  # free the last box before the next is read
                        held = (item.storage_index, self._read_box(stream, name, item.storage_index))
                    part = held[1]
                    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_box(self, stream: BinaryIO, name: str, index: MetadataIndex) -> Tensor:
        info = self.storage_data[index]
        try:
            box = torch.load(
                _create_file_view(stream, info.offset, info.length),  # type: ignore[arg-type]
                map_location="cpu",
                weights_only=True,
                mmap=False,
            )
        except Exception as error:
            raise CheckpointCorruptError(f"{self.directory / name}: {index.fqn} can't be read: {error}") from error
        entry = self.metadata.state_dict_metadata[index.fqn]
        assert index.index is not None  # the plan has it of every box; to search for one takes the time of all ranks
        chunk = entry.chunks[index.index]  # type: ignore[union-attr]
        dtype = entry.properties.dtype  # type: ignore[union-attr]
        if not isinstance(box, Tensor) or box.shape != chunk.sizes or box.dtype != dtype:
            raise CheckpointCorruptError(
                f"{self.directory / name}: {index.fqn} is not a {dtype} tensor of shape {tuple(chunk.sizes)}"
            )
        return box


def read_whole(reader: CheckedReader, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The whole tensor ``key`` on the host; beside it one stored box is in memory at a time."""
    tensor = torch.empty(shape, dtype=dtype)
    planner = TensorLoadPlanner()
    planner.set_up_planner({key: tensor}, reader.metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return tensor


def _by_file(items: Sequence[ReadItem], storage: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, list[ReadItem]]:
    grouped: dict[str, list[ReadItem]] = {}
    for item in sorted(items, key=lambda item: storage[item.storage_index].offset):
        grouped.setdefault(storage[item.storage_index].relative_path, []).append(item)
    return grouped
