"""Files of ``torch.save``, written and read one tensor at a time, where torch itself needs all at once.

The format is a zip archive without compression: ``data.pkl``, in which a tensor refers to its storage by number, and
``data/<number>`` with the storage's bytes (torch's notes on serialization).
"""

import io
import os
import pickle
import re
import struct
import sys
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_shard.checkpoint.files.layout import damaged_if
from lightning_shard.checkpoint.files.manifest import StoredTensor, raw_bytes
from lightning_shard.checkpoint.files.trainer_state import check_archive, refusal
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from lightning_shard.private_names import require
from lightning_shard.tensors.tracing import tree_map_only

require(torch.UntypedStorage, "_checkpoint_offset")

_ALIGNMENT = 64
_BLOCK = 1 << 24
_PAYLOAD = "archive"


@dataclass(frozen=True, kw_only=True, eq=False)
class ArchivedTensor(StoredTensor):
    # Byte in the file, shape and strides: equal for two names of one tensor.
    place: tuple[int, tuple[int, ...], tuple[int, ...]]
    elements: Callable[[int, int], Tensor]  # Values ``start`` to ``stop`` of a contiguous tensor, row-major, 1-D.


class _Storage:
    def __init__(self, kind: Any, key: str, numel: int) -> None:
        self.reference = ("storage", kind, key, "cpu", numel)


class _Pickler(pickle.Pickler):
    """Pickles a tree with `StoredTensor` in it as ``torch.save`` does one with tensors."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.tensors: list[Callable[[], Tensor]] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            return self._tensor(tuple(plain.shape), plain.dtype, lambda: plain)
        if isinstance(value, StoredTensor):
            return self._tensor(value.shape, value.dtype, value.read)
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Any:
        numel = torch.Size(shape).numel()
        # How torch itself rebuilds such a tensor; only where it lies and how large it is are put in.
        rebuild, (storage, _, _, _, *rest) = (example := torch.empty(0, dtype=dtype)).__reduce_ex__(2)
        typed = isinstance(storage, torch.storage.TypedStorage)
        name = example.type().removeprefix("torch.").replace("Tensor", "Storage")  # such as FloatStorage
        kind = getattr(torch, name) if typed else torch.UntypedStorage
        key = str(len(self.tensors))
        self.tensors.append(read)
        place = _Storage(kind, key, numel if typed else numel * dtype.itemsize)
        return rebuild, (place, 0, shape, torch.empty(shape, device="meta").stride(), *rest)


def write_archive(path: Path, tree: Mapping[str, Any]) -> None:
    """Write ``tree`` as ``torch.save`` would, one tensor or `StoredTensor` in memory at a time; synced."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(dict(tree))
    with open(path, "wb") as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _write_record(archive, "data.pkl", pickled.getvalue())
            _write_record(archive, "byteorder", sys.byteorder.encode())
            for key, read in enumerate(pickler.tensors):
                _write_record(archive, f"data/{key}", raw_bytes(read()))
            _write_record(archive, "version", b"3\n")
        stream.flush()
        os.fsync(stream.fileno())


def _write_record(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(f"{_PAYLOAD}/{name}", (1980, 1, 1, 0, 0, 0))
    # Bytes of tensors begin at multiples of 64, for who maps the file. The local header has 30 bytes, the name, the
    # 20 bytes that zipfile adds for large files, and this padding, whose own header has 4.
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(info.filename) + 20 + 4
    padding = -start % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(data)


def read_archive(path: Path, allowed: Mapping[str, Any] | None = None) -> Any:
    """What ``torch.save`` wrote to ``path``, with a `StoredTensor` in each tensor's place; nothing of it is run or
    read. ``allowed``: full name of a class beyond those of ``weights_only=True``, to what stands for it.
    CheckpointCorruptError: the file names any other class or function, or is damaged.
    """
    file = _Archive(path)
    known = torch.serialization.safe_globals([(stand_in, name) for name, stand_in in (allowed or {}).items()])
    with known, damaged_if(partial(refusal, path)):
        tree = torch.load(path, map_location="meta", weights_only=True, mmap=False)
        tensors: list[Tensor] = []
        tree_map_only(Tensor, tensors.append, tree)
        file.check_places(tensor.untyped_storage() for tensor in tensors if _is_dense(tensor))
        return tree_map_only(Tensor, partial(_archived, file), tree)


class _Archive:
    """The records of a file of ``torch.save``, each compared with its CRC-32 when it is first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file() or not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} is no whole file of torch.save: it is cut short, of something else, or of a torch before 1.6 "
                "(then load it there and save it again)."
            )
        with damaged_if(lambda error: f"{path} can't be read: {error}"):
            self._identity = _identity(status := os.stat(path))
            self.size = status.st_size
            records = check_archive(path, path)
            with zipfile.ZipFile(path) as archive:
                orders = [archive.read(info) for info in records if re.fullmatch("[^/]*/byteorder", info.filename)]
            self._records = sorted(records, key=lambda info: info.header_offset)
        if orders not in ([], [sys.byteorder.encode()]):
            raise CheckpointError(f"{path} was written on a machine of another byte order ({orders[0]!r})")
        self._starts = [info.header_offset for info in self._records]
        self._checked: set[str] = set()

    def check_places(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Refuse a zip that torch did not write: it computes where storages lie from ``data/0``, ``data/1`` ..."""
        if not any(info.filename.endswith("/.format_version") for info in self._records):
            return
        sizes, numbers = dict[int, int](), list[int]()
        with open(self.path, "rb") as stream:
            for info in self._records:
                if (found := re.fullmatch("[^/]*/data/([0-9]+)", info.filename)) is not None:
                    numbers.append(int(found[1]))
                    stream.seek(info.header_offset + 26)  # the lengths of the name and of what follows it
                    sizes[info.header_offset + 30 + sum(struct.unpack("<2H", stream.read(4)))] = info.file_size
        lie = (sizes.get(_begin(storage)) == storage.nbytes() for storage in storages)
        if numbers != sorted(set(numbers)) or not all(lie):
            raise CheckpointError(
                f"{self.path} was zipped anew, or is damaged: its tensors do not lie where torch.save puts them. Save "
                "it again, by torch.save(torch.load(path), path), or use another checkpoint."
            )

    def read(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(count, dtype=dtype)
        with open(self.path, "rb") as stream:
            if _identity(os.fstat(stream.fileno())) != self._identity:
                raise CheckpointError(f"{self.path} was replaced while it was read: read it again")
            info = self._records[bisect_right(self._starts, start) - 1]
            if info.filename not in self._checked:
                self._check(stream, info)
            stream.seek(start)
            if stream.readinto(raw_bytes(tensor)) != tensor.nbytes:
                raise CheckpointCorruptError(f"{self.path} ends before the tensors in it do")
        return tensor

    def _check(self, stream: BinaryIO, info: zipfile.ZipInfo) -> None:
        try:
            with zipfile.ZipFile(stream) as archive, archive.open(info) as record:
                while record.read(_BLOCK):  # raises at the end of a record that differs
                    pass
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise CheckpointCorruptError(f"{self.path} is damaged: {error}. Use another checkpoint.") from error
        self._checked.add(info.filename)


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def materialize(value: Any) -> Any:
    """``value`` with a tensor in the place of every `StoredTensor`; all of them are read."""
    return tree_map_only(StoredTensor, lambda stored: stored.read(), value)


def _begin(storage: Any) -> int:
    """Where the bytes of a storage lie in the file, which torch notes in one without bytes."""
    return int(storage._checkpoint_offset)


def _is_dense(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized


def _archived(file: _Archive, meta: Tensor) -> ArchivedTensor:
    if not _is_dense(meta):
        raise CheckpointError(f"{file.path} holds a {meta.layout} tensor; only dense tensors can be read")
    start = _begin(meta.untyped_storage()) + int(meta.storage_offset()) * meta.element_size()
    shape, stride, dtype = tuple(meta.shape), meta.stride(), meta.dtype
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if meta.numel() else 0
    contiguous = meta.is_contiguous()
    if meta.numel() * dtype.itemsize > 2 * file.size + _BLOCK:
        raise CheckpointCorruptError(f"{file.path} has {file.size} bytes, and a tensor of shape {shape} in them")

    def elements(first: int, last: int) -> Tensor:
        assert contiguous
        return file.read(start + first * dtype.itemsize, last - first, dtype)

    def read() -> Tensor:
        return file.read(start, span, dtype).as_strided(shape, stride).contiguous()

    return ArchivedTensor(shape=shape, dtype=dtype, read=read, place=(start, shape, stride), elements=elements)
