"""Files of ``torch.save``, written and read one tensor at a time. torch itself writes from memory for all of them.

The format is a zip archive without compression: ``data.pkl``, in which a tensor refers to its storage by number, and
``data/<number>`` with the storage's bytes (torch's notes on serialization).
"""

import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.files.layout import damaged_if
from lightning_shard.checkpoint.files.manifest import StoredTensor, raw_bytes
from lightning_shard.checkpoint.files.trainer_state import load_archive, refusal
from lightning_shard.errors import CheckpointError

_ALIGNMENT = 64
_PAYLOAD = "archive"


class _Storage:
    def __init__(self, kind: Any, key: str, numel: int) -> None:
        self.reference = ("storage", kind, key, "cpu", numel)


class _Pickler(pickle.Pickler):
    """Pickles a tree with `StoredTensor`s as ``torch.save`` pickles one with tensors."""

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
        # torch's own way to rebuild such a tensor, with another storage, shape and strides.
        rebuild, (storage, _, _, _, *rest) = (example := torch.empty(0, dtype=dtype)).__reduce_ex__(2)
        typed = isinstance(storage, torch.storage.TypedStorage)
        name = example.type().removeprefix("torch.").replace("Tensor", "Storage")  # such as FloatStorage
        kind = getattr(torch, name) if typed else torch.UntypedStorage
        key = str(len(self.tensors))
        self.tensors.append(read)
        place = _Storage(kind, key, numel if typed else numel * dtype.itemsize)
        return rebuild, (place, 0, shape, torch.empty(shape, device="meta").stride(), *rest)


def write_archive(path: Path, tree: Mapping[str, Any]) -> None:
    """Write ``tree`` as ``torch.save`` would, one tensor or `StoredTensor` in memory at a time, and sync the file."""
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
    # Tensors begin at multiples of 64 bytes, so that the file can be mapped. The local header has 30 bytes, the name,
    # 20 bytes that zipfile adds for large files, and this padding with a header of 4 bytes.
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(info.filename) + 20 + 4
    padding = -start % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(data)


def read_archive(path: Path, allowed: Mapping[str, Any] | None = None) -> Any:
    """Load a file of ``torch.save``, its tensors mapped, so that values are read on use. Nothing in it runs.

    ``allowed``: full name to stand-in of classes beyond those of ``weights_only=True``. CheckpointCorruptError: the
    file names another class, or is damaged.
    """
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is no whole file of torch.save: it is cut short, of something else, or of a torch before 1.6 "
            "(then load it there and save it again)."
        )
    known = torch.serialization.safe_globals([(stand_in, name) for name, stand_in in (allowed or {}).items()])
    with known, damaged_if(partial(refusal, path)):
        return load_archive(path, path)
