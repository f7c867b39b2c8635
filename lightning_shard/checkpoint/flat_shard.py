"""Parts of a tensor that lie in flat memory, written and read there through torch's checkpointable protocol.

An engine that flattens parameters, concatenates and cuts them (ZeRO) leaves each rank contiguous row-major ranges of
some of them. Such a range is a handful of axis-aligned boxes, and boxes are what torch.distributed.checkpoint stores;
each box is contiguous in the range, so that a view of the flat memory is the box's tensor: nothing is gathered,
nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, kw_only=True)
class Box:
    """An axis-aligned part of a tensor that is contiguous in the tensor's row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    start: int
    """Where it begins in the range that was cut into boxes, in elements."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, length: int) -> list[Box]:
    """Elements ``[start, start + length)`` of a tensor's row-major order as boxes, in that order.

    At most ``2 * len(shape) - 1`` of them (one for a scalar): the rest of a begun row, whole rows, the beginning of
    one more; and the same in each of the two rows that are not whole. No element, no box.

    Raises ValueError for a range that is not inside the tensor.
    """
    if start < 0 or length < 0 or start + length > math.prod(shape):
        raise ValueError(f"elements [{start}, {start + length}) are not all in a tensor of shape {tuple(shape)}")
    found: list[Box] = []
    _cut(tuple(shape), start, start + length, (), start, found)
    return found


def _cut(shape: tuple[int, ...], begin: int, end: int, prefix: tuple[int, ...], origin: int, found: list[Box]) -> None:
    """Append the boxes of ``[begin, end)`` of the sub-tensor at ``prefix``; the range cut began at ``origin`` in it."""
    if begin == end:
        return
    if not shape:
        found.append(Box(offsets=prefix, sizes=(1,) * len(prefix), start=begin - origin))
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows in [first, last) are whole
    if first > last:  # inside one row
        _cut(shape[1:], begin - last * row, end - last * row, (*prefix, last), origin - last * row, found)
        return
    if begin < first * row:
        before = (first - 1) * row
        _cut(shape[1:], begin - before, row, (*prefix, first - 1), origin - before, found)
    if first < last:
        offsets = (*prefix, first, *(0 for _ in shape[1:]))
        sizes = (*(1 for _ in prefix), last - first, *shape[1:])
        found.append(Box(offsets=offsets, sizes=sizes, start=first * row - origin))
    if last * row < end:
        _cut(shape[1:], 0, end - last * row, (*prefix, last), origin - last * row, found)


@dataclass(frozen=True)
class FlatPiece:
    """Live flat memory that holds a contiguous row-major range of a tensor."""

    data: Tensor
    """1-D, contiguous; reading a checkpoint writes to it."""

    start: int
    """Where the range begins in the tensor, in elements of its row-major order."""


class FlatTensor:
    """What this rank holds of a tensor of ``shape``: pieces of flat memory, which may be none at all.

    Has torch's checkpointable protocol (``torch/distributed/_checkpointable.py``), so that checkpoints take it as a
    tensor. Every rank makes one, with the same shape and dtype; together the ranks hold all elements, and pieces that
    several ranks hold are the same ones.

    Raises ValueError for pieces of another dtype, that are not flat, overlap or leave the tensor.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[FlatPiece]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._boxes: list[Box] = []
        self._views: dict[tuple[int, ...], Tensor] = {}
        end = 0
        for piece in sorted(pieces, key=lambda piece: piece.start):
            data = piece.data.detach()
            if data.ndim != 1 or not data.is_contiguous() or data.dtype != dtype:
                raise ValueError(
                    f"a piece of a flat {dtype} tensor is 1-D, contiguous and of that dtype, not of shape "
                    f"{tuple(data.shape)}, strides {data.stride()} and {data.dtype}"
                )
            if piece.start < end:
                raise ValueError(f"the pieces overlap: one begins at {piece.start}, the one before ends at {end}")
            for box in boxes(self.shape, piece.start, data.numel()):
                self._boxes.append(box)
                self._views[box.offsets] = data[box.start : box.start + box.length].view(box.sizes)
            end = piece.start + data.numel()
        if self.shape.numel() == 0:
            # No range has such a tensor's elements, but a checkpoint has the tensor: any rank can write it.
            origin = (0,) * len(self.shape)
            self._boxes = [Box(offsets=origin, sizes=tuple(self.shape), start=0)]
            self._views = {origin: torch.empty(self.shape, dtype=dtype)}

    def __repr__(self) -> str:
        held = sum(box.length for box in self._boxes)
        return f"FlatTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {held} elements here)"

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self._boxes
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._views[tuple(index.offset)]
