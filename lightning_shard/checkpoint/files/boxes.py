"""``boxes.bin``: the place of each box of each tensor in the files, as numbers that a rank decodes tensor by tensor.

Its integers have 64 bits, little endian. First, for each of the manifest's tensors by sorted key: the number of its
boxes and of the bytes of its table. Then the tables, compressed by zlib. A row is a box: the number of its file among
the sorted ``.distcp`` files, first byte and length there, offsets and sizes by dim. Rows after the first are stored as
differences to the row before, column by column. So each box of 16,384 ranks takes a byte or two.

``.metadata`` says the same to torch's tools, in objects that take 30 us for each box of all ranks. It is a pickle, and
a pickle can name any function to call. So torch's own, and ours in format 1, are read by mapping the names in torch's
metadata to inert records. Every other name is refused. The records are checked against the manifest.
"""

import io
import pickle
import pickletools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # the full text of values that share their parts may be endless
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.layout import Directory
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.errors import CheckpointCorruptError
from lightning_shard.text import listed

Integers = NDArray[np.int64]


class TensorFacts(NamedTuple):
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot: layout.SlotName | None = None  # of a tensor of optimizer state


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedBoxes:
    """The boxes that all ranks write, by tensor in the order of keys."""

    # Rows as of `StoredBoxes`. Instead of a place: rank, number among the boxes that the rank writes, 0.
    tables: Sequence[tuple[TensorFacts, Integers]]
    described: list[Any] = field(default_factory=list)  # places in the last save, and the files that describe them


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredBoxes:
    """The boxes of one tensor in the files. Together they are all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Integers  # (boxes, 3 + 2 * len(shape)): number of the file, first byte, length, offsets, sizes
    files: Sequence[str]

    def meeting(self, chunk: ChunkStorageMetadata) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Yield the row of each box that overlaps ``chunk``, and the offsets of the overlap's begin and end."""
        begin, sizes = self._begin_and_sizes()
        offsets = np.array(chunk.offsets, dtype=np.int64)
        low = np.maximum(begin, offsets)
        high = np.minimum(begin + sizes, offsets + np.array(chunk.sizes, dtype=np.int64))
        for number in np.flatnonzero((low < high).all(axis=1)).tolist():
            yield self.rows[number].tolist(), low[number].tolist(), high[number].tolist()

    def _begin_and_sizes(self) -> tuple[Integers, Integers]:
        ndim = len(self.shape)
        return self.rows[:, 3 : 3 + ndim], self.rows[:, 3 + ndim :]

    def checked(self, key: str, sizes: Integers) -> "StoredBoxes":
        """Return these boxes. CheckpointCorruptError: one is not inside the tensor, or a file, of ``sizes`` bytes."""
        begin, extent = self._begin_and_sizes()
        shape = np.array(self.shape, dtype=np.int64)
        file, start, length = self.rows[:, 0], self.rows[:, 1], self.rows[:, 2]
        if (self.rows < 0).any() or (file >= len(sizes)).any() or (length > sizes[file]).any():
            raise CheckpointCorruptError(f"a box of {key} points outside of the files")
        if (start > sizes[file] - length).any() or (begin > shape).any() or (extent > shape - begin).any():
            raise CheckpointCorruptError(f"a box of {key} is outside of its shape {self.shape}, or of its file")
        if (np.prod(extent, axis=1, dtype=np.float64) * self.dtype.itemsize > length).any():
            raise CheckpointCorruptError(f"a box of {key} has more elements than bytes in its file")
        return self

    def check_covered(self, key: str) -> None:
        """CheckpointCorruptError: the boxes, which are `checked`, do not have each element once."""
        if not covered_once(self.shape, *self._begin_and_sizes()):
            raise CheckpointCorruptError(f"the boxes of {key} do not make up its shape {self.shape} without overlap")


def covered_once(shape: Sequence[int], begin: Integers, sizes: Integers) -> bool:
    """True if the boxes ``begin`` and ``sizes``, inside of ``shape``, have each element once.

    Each stretch between ends of boxes along a dim gets a random weight. An element's weight is the product of its
    stretches', modulo 2**64. If the boxes' weights add up to the tensor's, they cover it once, except by a chance of
    one in billions.
    """
    random = np.random.default_rng()
    found, wanted = np.ones(len(begin), dtype=np.uint64), np.ones(1, dtype=np.uint64)
    for dim, size in enumerate(shape):
        first, last = begin[:, dim], begin[:, dim] + sizes[:, dim]
        ends = np.unique(np.concatenate([first, last, [0, size]]))
        weights = random.integers(0, 2**64, len(ends) - 1, dtype=np.uint64) | np.uint64(1)
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(weights, dtype=np.uint64)])
        found *= sums[np.searchsorted(ends, last)] - sums[np.searchsorted(ends, first)]
        wanted *= sums[-1:]
    return bool(found.sum(dtype=np.uint64) == wanted[0])


def encode_boxes(tables: Iterable[Integers]) -> bytes:
    """Return the contents of ``boxes.bin``. ``tables``: the rows of each tensor's boxes, by sorted key."""
    counts, blocks = [], []
    for rows in tables:
        counts.append(len(rows))
        columns = np.ascontiguousarray(np.diff(rows, axis=0, prepend=0).T, dtype="<i8")
        blocks.append(zlib.compress(columns.data, level=1))
    header = np.array([counts, [len(block) for block in blocks]], dtype="<i8")
    return b"".join((header.T.tobytes(), *blocks))


class DecodedBoxes(Mapping[str, StoredBoxes]):
    """Key to boxes, decoded and `checked` at each access and not kept."""

    def __init__(self, data: bytes, manifest: Manifest) -> None:
        """CheckpointCorruptError: ``data`` does not describe the manifest's tensors."""
        self._manifest = manifest
        self._files, self._sizes = data_files(manifest.files)
        self._tables: dict[str, tuple[memoryview, int]] = {}  # compressed table, number of boxes
        numbers: Integers = np.frombuffer(data[: 16 * len(manifest.tensors)], dtype="<i8").reshape(-1, 2)
        at, most = numbers.nbytes, sum(self._sizes.tolist())
        for key, (count, size) in zip(sorted(manifest.tensors), numbers.tolist(), strict=True):
            if count < 1 or size < 0 or at + size > len(data):
                raise CheckpointCorruptError(f"it ends before the boxes of {key} do")
            if count * self._width(key) * 8 > most:  # a box takes more bytes in its file
                raise CheckpointCorruptError(f"{key} has {count} boxes, for which the files are too small")
            self._tables[key] = memoryview(data)[at : at + size], count
            at += size
        if at != len(data):
            raise CheckpointCorruptError("it has more boxes than the manifest has tensors for")

    def _width(self, key: str) -> int:
        return 3 + 2 * len(self._manifest.tensors[key].shape)

    def __getitem__(self, key: str) -> StoredBoxes:
        (data, count), width, entry = self._tables[key], self._width(key), self._manifest.tensors[key]
        stream, size = zlib.decompressobj(), count * width * 8
        with layout.damaged_if(f"the boxes of {key} can't be read"):
            columns = stream.decompress(data, size + 1)
        if len(columns) != size or not stream.eof or stream.unused_data:
            raise CheckpointCorruptError(f"the boxes of {key} are not {count}")
        rows = np.cumsum(np.frombuffer(columns, dtype="<i8").reshape(width, count), axis=1).T
        return StoredBoxes(shape=entry.shape, dtype=entry.dtype, rows=rows, files=self._files).checked(key, self._sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def data_files(files: Mapping[str, layout.FileEntry]) -> tuple[list[str], Any]:
    """Return the names of the data files in the order in which boxes number them, and their sizes in bytes."""
    names = sorted(name for name in files if name.endswith(layout.DATA_SUFFIX))
    return names, np.array([files[name].size for name in names], dtype=np.int64)


_DCP = "torch.distributed.checkpoint.metadata"
_NAMES = "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta"
_RECORDS = {(_DCP, name) for name in _NAMES.split()} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
# Torch's own writer also records items that are no tensors, and the path of the checkpoint.
_FOREIGN_RECORDS = _RECORDS | {(_DCP, "BytesStorageMetadata"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")}


def read_boxes(directory: Directory, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> Mapping[str, StoredBoxes]:
    """Return key to the boxes of each tensor, from ``boxes.bin``, in format 1 from ``.metadata``.

    ``share``: this rank and the number of ranks. Each checks that the boxes of its part of the tensors make them up.
    CheckpointCorruptError: a file that does not match its checksum, names a class that is not torch's metadata, or does
    not describe exactly the manifest's tensors in the manifest's files.
    """
    name = boxes_file(manifest)
    data = directory.read(name, manifest.files)
    with layout.damaged_if(f"{directory.path / name} is no checkpoint metadata", directory.path / name):
        if name == layout.BOXES:
            found = DecodedBoxes(data, manifest)
            for key in sorted(found)[share[0] :: share[1]]:
                found[key].check_covered(key)
            return found
        tensors = _parse(data, _RECORDS, manifest.files)[1]
        described = {key: (boxes.shape, boxes.dtype) for key, boxes in tensors.items()}
        entries = {key: (entry.shape, entry.dtype) for key, entry in manifest.tensors.items()}
        if differing := sorted(k for k in described.keys() | entries.keys() if described.get(k) != entries.get(k)):
            raise CheckpointCorruptError(f"it and the manifest describe other tensors: {listed(differing)}")
        return tensors


def boxes_file(manifest: Manifest) -> str:
    return layout.METADATA if manifest.format_version == 1 else layout.BOXES


def parse_foreign_metadata(
    data: bytes, files: Mapping[str, layout.FileEntry], where: object
) -> tuple[dict[str, StoredBoxes], dict[str, StorageInfo], dict[str, tuple[str | int, ...]]]:
    """Read another library's ``.metadata``, which describes ``files``. Errors as of `read_boxes`.

    Returned: key to the boxes of each tensor, key to the place of each other item, and key to the path of either in the
    nested dictionary that was saved.
    """
    with layout.damaged_if(f"{where} is no checkpoint metadata", where):
        root, tensors, items = _parse(data, _FOREIGN_RECORDS, files)
        paths = {key: tuple(root["planner_data"][key]) for key in root["state_dict_metadata"]}
        if not all(type(part) in (str, int) for path in paths.values() for part in path):
            raise CheckpointCorruptError("a key's path is not made of names and numbers")
        return tensors, items, paths


class _Unpickler(pickle.Unpickler):
    """Maps the names in torch's metadata to record classes and functions of this instance alone."""

    def __init__(self, data: bytes, records: Iterable[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._known: dict[tuple[str, str], Any] = {known: type(known[1], (_Record,), {}) for known in records}
        # New functions each time, so that an attribute that the pickle sets on one does not stay.
        self._known["torch", "Size"] = lambda sizes=(): tuple(sizes)
        self._known["torch.serialization", "_get_layout"] = lambda name: name
        self._known[_DCP, "_MEM_FORMAT_ENCODING"] = lambda code: code
        # Python 3.11.0 to 3.11.3 (Debian 12) pickle a member of an enumeration as getattr(enumeration, name).
        self._known["builtins", "getattr"] = lambda owner, name: name

    def find_class(self, module: str, name: str) -> Any:
        """CheckpointCorruptError for a name that torch's metadata does not have."""
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointCorruptError(
            f"it names {module}.{name}, which is not part of a checkpoint's metadata; it was not opened"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointCorruptError("it refers to an object outside of itself")


class _Record:
    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record) or not isinstance(record.state, dict):
        raise CheckpointCorruptError(f"a {type(record).__name__} stands where a {kind} belongs; only tensors are read")
    return record.state


def _parse(
    data: bytes, records: Iterable[tuple[str, str]], files: Mapping[str, layout.FileEntry]
) -> tuple[dict[str, Any], dict[str, StoredBoxes], dict[str, StorageInfo]]:
    """Return the root's fields, key to boxes of each tensor, and key to place of each item that is no tensor."""
    # pickle allocates memory up to the largest number that it is told to give an object.
    if any(op.name in ("PUT", "LONG_BINPUT") and (arg or 0) > len(data) for op, arg, _ in pickletools.genops(data)):
        raise CheckpointCorruptError(f"it numbers more objects than its {len(data)} bytes can hold")
    root = _fields(_Unpickler(data, records).load(), "Metadata")
    names, sizes = data_files(files)
    numbers = {name: number for number, name in enumerate(names)}
    places: dict[tuple[str, tuple[int, ...] | None], StorageInfo] = {}  # by key and offsets of a box (None: no tensor)
    for record, value in root["storage_data"].items():
        index = _fields(record, "MetadataIndex")
        places[index["fqn"], index.get("offset")] = _location(value, files)
    tensors: dict[str, StoredBoxes] = {}
    items: dict[str, StorageInfo] = {}
    for key, value in root["state_dict_metadata"].items():
        if type(value).__name__ == "BytesStorageMetadata":
            items[key] = places[key, None]
            continue
        fields = _fields(value, "TensorStorageMetadata")
        shape, dtype, rows = _size(fields["size"]), fields["properties"].state[0], list[list[int]]()
        if type(key) is not str or not isinstance(dtype, torch.dtype):
            raise CheckpointCorruptError(f"{shown(key)} is not described as a tensor")
        for part in (_fields(part, "ChunkStorageMetadata") for part in fields["chunks"]):
            offsets, extent = _size(part["offsets"]), _size(part["sizes"])
            if (place := places.get((key, offsets))) is None:
                raise CheckpointCorruptError(f"{key} has a part at {offsets} that no file holds")
            rows.append([numbers[place.relative_path], place.offset, place.length, *offsets, *extent])
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + 2 * len(shape))
        tensors[key] = StoredBoxes(shape=shape, dtype=dtype, rows=table, files=names).checked(key, sizes)
        tensors[key].check_covered(key)
    return root, tensors, items


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(length) is int and length >= 0 for length in value):
        raise CheckpointCorruptError(f"{shown(value)} is no shape")
    return value


def _location(record: Any, files: Mapping[str, layout.FileEntry]) -> StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(name) is not str or layout.check_relative(name) not in files:
        raise CheckpointCorruptError(f"it points at {shown(name)}, which the manifest does not list")
    if fields.get("transform_descriptors"):
        raise CheckpointCorruptError("it asks for a stream transform")
    size = files[name].size
    if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0 and offset + length <= size):
        raise CheckpointCorruptError(f"it points outside of {name}")
    return StorageInfo(name, offset, length)
