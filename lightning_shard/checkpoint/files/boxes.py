"""``boxes.bin``: where each box of each tensor lies in the files, as numbers that a rank reads tensor by tensor.

64-bit integers, little endian: of each of the manifest's tensors, by sorted key, the number of its boxes and the number
of bytes that they take here; then in that order the boxes of each tensor, compressed by zlib: a row for each box (the
number of its file among the sorted ``.distcp`` files, first byte and length there, offsets and sizes by dim), of which
every row but the first is the difference to the one before, column by column. So 16,384 ranks' boxes take a byte or two
each, and no rank has those of more than one tensor in memory at a time. Before format 6 the rows were as they are.

``.metadata`` says the same to torch's tools, as objects that take 30 us for each box of all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_shard.checkpoint.files.layout import DATA_SUFFIX, FileEntry, SlotName, torch_dtype
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.errors import CheckpointCorruptError

Integers = NDArray[np.int64]


class TensorFacts(NamedTuple):
    """What all ranks know of a tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot: SlotName | None = None  # Of optimizer state, which it is.


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxesByRank:
    """The boxes that all ranks write, each rank's in the order in which it writes them."""

    tensors: Sequence[TensorFacts]  # By sorted key.
    counts: Sequence[int]  # By rank, how many of the boxes are its own.
    tensor: Integers  # Of each box the number of its tensor.
    boxes: Integers  # Shape ``(boxes, 2, dims)``: offsets and sizes; behind a tensor's own dims 0 and 1.
    described: list[Any] = field(default_factory=list)  # Where they lay in the last save, and the files that say so.

    def tables(self, places: Integers) -> Iterator[tuple[TensorFacts, Integers]]:
        """Each tensor, and the rows of its boxes as in `StoredBoxes`; ``places``: of each box its file, first byte and
        length, shape ``(boxes, 3)``.
        """
        order = np.argsort(self.tensor, kind="stable")
        ends = np.searchsorted(self.tensor[order], np.arange(len(self.tensors) + 1))
        for number, facts in enumerate(self.tensors):
            rows = order[ends[number] : ends[number + 1]]
            boxes = self.boxes[rows][:, :, : len(facts.shape)]
            yield facts, np.concatenate([places[rows], boxes.reshape(len(rows), -1)], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredBoxes:
    """The boxes of one tensor, which together are all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Integers  # Shape ``(boxes, 3 + 2 * len(shape))``: number of the file, first byte, length, offsets, sizes.
    files: Sequence[str]

    def meeting(self, chunk: ChunkStorageMetadata) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Row of each box that has elements in common with ``chunk``, where these begin and where they end."""
        begin, sizes = self._begin_and_sizes()
        offsets = np.array(chunk.offsets, dtype=np.int64)
        low = np.maximum(begin, offsets)
        high = np.minimum(begin + sizes, offsets + np.array(chunk.sizes, dtype=np.int64))
        for number in np.flatnonzero((low < high).all(axis=1)).tolist():
            yield self.rows[number].tolist(), low[number].tolist(), high[number].tolist()

    def _begin_and_sizes(self) -> tuple[Integers, Integers]:
        ndim = len(self.shape)
        return self.rows[:, 3 : 3 + ndim], self.rows[:, 3 + ndim :]

    def checked(self, key: str, sizes: Integers) -> StoredBoxes:
        """These boxes; CheckpointCorruptError where one is not in the tensor, or not in one of ``files``.

        ``sizes``: bytes of each file. What is read takes no more memory than the files have bytes.
        """
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
        """Raise CheckpointCorruptError where the boxes, `checked`, are not all of the tensor, each element once."""
        if not covered_once(self.shape, *self._begin_and_sizes()):
            raise CheckpointCorruptError(f"the boxes of {key} do not make up its shape {self.shape} without overlap")


def covered_once(shape: Sequence[int], begin: Integers, sizes: Integers) -> bool:
    """Whether boxes inside of ``shape`` have each of its elements once; rows of ``begin`` and ``sizes`` are boxes.

    Each stretch between ends of boxes along a dim has a random weight, an element the product of its stretches', all
    modulo 2**64. If the boxes' sum is that of the tensor, they cover it once, but for one chance in billions.
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
    """The contents of ``boxes.bin``; ``tables``: the rows of each tensor's boxes, by sorted key."""
    counts, blocks = [], []
    for rows in tables:
        counts.append(len(rows))
        columns = np.ascontiguousarray(np.diff(rows, axis=0, prepend=0).T, dtype="<i8")
        blocks.append(zlib.compress(columns.data, level=1))
    header = np.array([counts, [len(block) for block in blocks]], dtype="<i8")
    return b"".join((header.T.tobytes(), *blocks))


def decode_boxes(data: bytes, manifest: Manifest) -> Mapping[str, StoredBoxes]:
    """Key to the boxes of each of the manifest's tensors, which are decoded and `checked` whenever they are asked for.

    Raises CheckpointCorruptError where ``data`` does not describe exactly these, and so does asking.
    """
    compressed, count_of = manifest.format_version > 5, len(manifest.tensors)
    numbers: Integers = np.frombuffer(data[: (1 + compressed) * 8 * count_of], dtype="<i8")
    numbers = numbers.reshape(count_of, 1 + compressed)
    tables: dict[str, Callable[[], Integers]] = {}
    at, most = numbers.nbytes, sum(data_files(manifest.files)[1].tolist())
    for key, (count, *length) in zip(sorted(manifest.tensors), numbers.tolist(), strict=True):
        width = 3 + 2 * len(manifest.tensors[key].shape)
        size = length[0] if length else count * width * 8
        if count < 1 or size < 0 or at + size > len(data):
            raise CheckpointCorruptError(f"it ends before the boxes of {key} do")
        if count * width * 8 > most:  # a box takes far more in its file
            raise CheckpointCorruptError(f"{key} has {count} boxes, for which the files are too small")
        decode = _inflated if compressed else _plain
        tables[key] = partial(decode, memoryview(data)[at : at + size], count, width, key)
        at += size
    if at != len(data):
        raise CheckpointCorruptError("it has more boxes than the manifest has tensors for")
    return _Decoded(tables, manifest)


def _plain(data: memoryview, count: int, width: int, key: str) -> Integers:
    return np.frombuffer(data, dtype="<i8").reshape(count, width)


def _inflated(data: memoryview, count: int, width: int, key: str) -> Integers:
    stream, size = zlib.decompressobj(), count * width * 8
    try:
        columns = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise CheckpointCorruptError(f"the boxes of {key} can't be read: {error}") from error
    if len(columns) != size or not stream.eof or stream.unused_data:
        raise CheckpointCorruptError(f"the boxes of {key} are not {count}")
    return np.cumsum(np.frombuffer(columns, dtype="<i8").reshape(width, count), axis=1).T


class _Decoded(Mapping[str, StoredBoxes]):
    """Boxes of tensors that are decoded when they are asked for, and not kept."""

    def __init__(self, tables: Mapping[str, Callable[[], Integers]], manifest: Manifest) -> None:
        self._tables, self._manifest = tables, manifest
        self._files, self._sizes = data_files(manifest.files)

    def __getitem__(self, key: str) -> StoredBoxes:
        rows, entry = self._tables[key](), self._manifest.tensors[key]
        boxes = StoredBoxes(shape=entry.shape, dtype=torch_dtype(entry.dtype), rows=rows, files=self._files)
        return boxes.checked(key, self._sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def data_files(files: Mapping[str, FileEntry]) -> tuple[list[str], Any]:
    """The names in the order in which boxes number them, and the bytes of each."""
    names = sorted(name for name in files if name.endswith(DATA_SUFFIX))
    return names, np.array([files[name].size for name in names], dtype=np.int64)
