"""Writing torch.distributed.checkpoint files.

The files are those of torch's own ``FileSystemWriter`` (each item a ``torch.save`` of one box of a tensor), so that
torch's tools read them. What differs: a file is hashed while it is written, and at most one item is copied to the host
at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from lightning_shard.checkpoint.layout import DATA_SUFFIX, FileEntry
from lightning_shard.checkpoint.plan import Values, Whole

_VERSION = "1.0.0"  # torch.distributed.checkpoint's, of these files


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


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank wrote."""

    places: Sequence[tuple[int, int]]
    """Offset and length of each of its boxes in its file, in the order in which it was given them."""

    files: Mapping[str, FileEntry]


def data_file(rank: int) -> str:
    """Name of the file with the boxes that a rank writes."""
    return f"__{rank}_0{DATA_SUFFIX}"


def write_boxes(directory: Path, rank: int, boxes: Sequence[MetadataIndex], values: Values) -> Written:
    """Write boxes into this rank's file in an existing directory, each copied to the host when its turn comes."""
    places: list[tuple[int, int]] = []
    if not boxes:
        return Written(places=places, files={})
    with HashedFile(directory / data_file(rank)) as stream:
        for index in boxes:
            start = stream.tell()
            torch.save(_row_major(values(index)), cast(BinaryIO, stream))
            places.append((start, stream.tell() - start))
    return Written(places=places, files={data_file(rank): stream.entry()})


def _row_major(tensor: Tensor) -> Tensor:
    """The same values on the host, in row-major order and a storage of no more than them."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write a new file at once."""
    with HashedFile(path) as stream:
        stream.write(data)
    return stream.entry()


def encode_metadata(whole: Whole, written: Sequence[Written]) -> bytes:
    """The contents of ``.metadata``; ``written``: by rank."""
    places = {
        index: _StorageInfo(data_file(rank), offset, length)
        for rank, (boxes, part) in enumerate(zip(whole.writers, written, strict=True))
        for index, (offset, length) in zip(boxes, part.places, strict=True)
    }
    # No path of the machine that wrote it, no random number.
    return pickle.dumps(
        Metadata(dict(whole.tensors), storage_data=places, storage_meta=StorageMeta(), version=_VERSION)
    )
