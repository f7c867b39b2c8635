"""``boxes.bin``: where each box of each tensor lies in the files, as numbers that a rank reads at once.

64-bit integers, little endian: the number of boxes of each of the manifest's tensors, by sorted key, then in that order
a row for each box: the number of its file among the sorted ``.distcp`` files, first byte and length there, offsets and
sizes by dim. ``.metadata`` says the same to torch's tools, as objects that take a rank 30 us for each box of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_shard.checkpoint.files.layout import DATA_SUFFIX, FileEntry, torch_dtype
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.errors import CheckpointCorruptError

Row = Sequence[int]  # Of a box: the number of its file, first byte, length, offsets, sizes.


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredBoxes:
    """The boxes of one tensor, which together are all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: NDArray[np.int64]  # Shape ``(boxes, 3 + 2 * len(shape))``; see `Row`.
    files: Sequence[str]

    def meeting(self, chunk: ChunkStorageMetadata) -> Iterator[tuple[int, list[int], list[int]]]:
        """Number of each box that has elements in common with ``chunk``, where these begin and where they end."""
        begin, sizes = self._begin_and_sizes()
        offsets = np.array(chunk.offsets, dtype=np.int64)
        low = np.maximum(begin, offsets)
        high = np.minimum(begin + sizes, offsets + np.array(chunk.sizes, dtype=np.int64))
        for number in np.flatnonzero((low < high).all(axis=1)).tolist():
            yield number, low[number].tolist(), high[number].tolist()

    def _begin_and_sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ndim = len(self.shape)
        return self.rows[:, 3 : 3 + ndim], self.rows[:, 3 + ndim :]

    def checked(self, key: str, sizes: NDArray[np.int64], *, covered: bool = True) -> StoredBoxes:
        """These boxes; CheckpointCorruptError where they are not all of the tensor, each in one of ``files``.

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
        if covered and not covered_once(self.shape, begin, extent):
            raise CheckpointCorruptError(f"the boxes of {key} do not make up its shape {self.shape} without overlap")
        return self


def covered_once(shape: Sequence[int], begin: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
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


def encode_boxes(rows: Mapping[str, Iterable[Row]]) -> bytes:
    """The contents of ``boxes.bin``; ``rows``: by key, of all tensors."""
    made = [np.array(list(rows[key]), dtype="<i8") for key in sorted(rows)]
    counts = np.array([len(part) for part in made], dtype="<i8")
    return b"".join(part.tobytes() for part in (counts, *made))


def decode_boxes(data: bytes, manifest: Manifest, *, covered: bool = True) -> dict[str, StoredBoxes]:
    """Key to the boxes of each of the manifest's tensors, checked; ``covered``: also whether they make these up.

    Raises CheckpointCorruptError where ``data`` does not describe exactly these; ValueError and OverflowError too.
    """
    numbers: NDArray[np.int64] = np.frombuffer(data, dtype="<i8")
    files, sizes = data_files(manifest.files)
    at, found = len(manifest.tensors), dict[str, StoredBoxes]()
    for key, count in zip(sorted(manifest.tensors), numbers[:at].tolist(), strict=True):
        entry = manifest.tensors[key]
        width = 3 + 2 * len(entry.shape)
        if count < 1 or at + count * width > len(numbers):
            raise CheckpointCorruptError(f"it ends before the boxes of {key} do")
        rows = numbers[at : at + count * width].reshape(count, width)
        at += count * width
        boxes = StoredBoxes(shape=entry.shape, dtype=torch_dtype(entry.dtype), rows=rows, files=files)
        found[key] = boxes.checked(key, sizes, covered=covered)
    if at != len(numbers):
        raise CheckpointCorruptError("it has more boxes than the manifest has tensors for")
    return found


def data_files(files: Mapping[str, FileEntry]) -> tuple[list[str], Any]:
    """The names in the order in which boxes number them, and the bytes of each."""
    names = sorted(name for name in files if name.endswith(DATA_SUFFIX))
    return names, np.array([files[name].size for name in names], dtype=np.int64)
