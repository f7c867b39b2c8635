"""A checkpoint whose tensors stay in its files until one is asked for; every form of checkpoint is read through it.

Converting and exporting take the tensors one after the other, so that memory is bounded by the largest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from lightning_shard.checkpoint.collect import CheckpointInfo
from lightning_shard.checkpoint.layout import torch_dtype
from lightning_shard.checkpoint.load import read_manifest
from lightning_shard.checkpoint.metadata import read_metadata
from lightning_shard.checkpoint.reader import CheckedReader, read_whole
from lightning_shard.checkpoint.save import save
from lightning_shard.checkpoint.trainer_state import read_trainer_state

PORTABLE, FULL = "portable", "full"

NOTES = "lightning_shard_full"
"""Key of the ``full`` form under which our own notes are; stock Lightning does not look at it."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in a file. It has torch's checkpointable protocol, so that a save reads it when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """A new contiguous tensor on the host; every call reads again."""

    def size(self) -> torch.Size:
        """The shape, as DCP asks for it."""
        return torch.Size(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size().numel() * self.dtype.itemsize

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(self.shape)), sizes=self.size())]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size())
        return [WriteItem(index=MetadataIndex(key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint of any form, in the portable form's terms."""

    form: str
    """``"portable"``, ``"full"``, or what another library calls its own."""

    tensors: Mapping[str, StoredTensor]
    """``model.<fqn>`` and ``optimizer.<i>.<fqn>.<slot>``; each tensor once."""

    aliases: Mapping[str, str]
    """Key of a tied name to the key of its tensor."""

    trainer_state: Mapping[str, Any]
    """What ``trainer.pt`` holds."""

    engine: str
    policy: str
    world_size: int
    ledger: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def open_portable(path: str | os.PathLike[str]) -> Stored:
    """The checkpoint directory ``path``; its tensors are read, checked against the metadata, when asked for.

    Files are not compared with their checksums; see `lightning_shard.checkpoint.inspect.verify`. Raises
    CheckpointNotFoundError or CheckpointCorruptError.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    reader = CheckedReader(directory, read_metadata(directory, manifest))

    def stored(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        return StoredTensor(shape=shape, dtype=dtype, read=lambda: read_whole(reader, key, shape, dtype))

    return Stored(
        form=PORTABLE,
        tensors={k: stored(k, entry.shape, torch_dtype(entry.dtype)) for k, entry in manifest.tensors.items()},
        aliases=manifest.aliases,
        trainer_state=read_trainer_state(directory, manifest=manifest),
        engine=manifest.engine,
        policy=manifest.policy,
        world_size=manifest.world_size,
        ledger=manifest.ledger,
        versions=manifest.versions,
    )


def write_portable(path: str | os.PathLike[str], stored: Stored) -> None:
    """Write ``stored`` as the checkpoint directory ``path``, whole or not at all. All ranks call it, with the same.

    Raises CheckpointError on every rank alike; what was at the path stays then.
    """
    info = CheckpointInfo(engine=stored.engine, policy=stored.policy, ledger=stored.ledger, aliases=stored.aliases)
    save(path, tensors=stored.tensors, trainer_state=stored.trainer_state, info=info)
