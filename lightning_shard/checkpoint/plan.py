"""Who writes what in a save, and whether it makes up whole tensors.

Every rank tells rank 0 which boxes of which tensors it holds. Rank 0 gives each box to one of its holders, so that
the bytes are evened out, and tells every rank its boxes by their numbers. Nothing here grows faster than the boxes
of all ranks do. A plan holds as long as no rank's tensors are cut in another way, and is kept until then.

Anything with torch's checkpointable protocol (``torch/distributed/_checkpointable.py``) can stand for a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.overlap import Cut, find_overlap
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks

Values = Callable[[MetadataIndex], Tensor]
"""The values of a box that this rank is to write."""

# Of each box in a file, beside its values: the archive that torch.save makes of it.
_OVERHEAD_BYTES = 1600


class Held(NamedTuple):
    """What one rank holds of a tensor, in values that are small when they are sent."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Cut, ...]
    first_counts: bool
    """Whether its values may differ between the ranks that hold them: the lowest writes it then."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What rank 0 knows of a plan."""

    tensors: Mapping[str, TensorStorageMetadata]
    writers: Sequence[Sequence[MetadataIndex]]
    """By rank, the boxes that it writes, in this order."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan that all ranks have agreed on."""

    mine: Sequence[MetadataIndex]
    """The boxes that this rank writes, in this order."""

    whole: Whole | None
    """None but on rank 0."""


class Plans:
    """The plan of the last save, for the next one whose tensors are cut in the same way."""

    def __init__(self) -> None:
        self._held: tuple[Held, ...] | None = None
        self._signature: tuple[Any, ...] | None = None
        self._plan: Plan | None = None

    def know(self, tensors: Mapping[str, Any], first_counts: Collection[str]) -> bool:
        """Look at what this rank is to save; whether its part of the last plan still holds. No communication.

        Raises CheckpointError for what can't be saved.
        """
        signature = tuple((key, key in first_counts, _signature(tensor)) for key, tensor in tensors.items())
        if self._plan is not None and signature == self._signature:
            return True
        for key, tensor in tensors.items():
            _check_savable(key, tensor)
        self._held = tuple(_held(key, tensor, key in first_counts) for key, tensor in tensors.items())
        self._signature, self._plan = signature, None
        return False

    def agreed(self, ranks: Ranks, *, known: bool) -> Plan:
        """The plan for what every rank has looked at. All ranks call it, with ``known`` where all know theirs."""
        if not known or self._plan is None:
            self._plan = self._make(ranks)
        return self._plan

    def _make(self, ranks: Ranks) -> Plan:
        assert self._held is not None
        held, whole = self._held, []

        def decide(all_held: list[tuple[Held, ...]]) -> list[list[int]]:
            numbers, made = divide(all_held)
            whole.append(made)
            return numbers

        numbers = ranks.exchange("planning the save", lambda: held, decide)
        boxes = [MetadataIndex(part.key, offsets) for part in held for offsets, _ in part.boxes]
        return Plan(mine=[boxes[number] for number in numbers], whole=whole[0] if whole else None)


def live_values(tensors: Mapping[str, Any]) -> Values:
    """The values as they are when they are asked for."""
    return lambda index: find_tensor_shard(tensors[index.fqn], index).detach()


def divide(all_held: Sequence[Sequence[Held]]) -> tuple[list[list[int]], Whole]:
    """Give every box to one rank.

    Args:
        all_held: by rank, what it holds, in its own order.

    Returns:
        By rank the numbers of the boxes that it writes, counted over all that it holds; and the whole.

    Raises:
        CheckpointError: the boxes do not make up whole tensors, or ranks disagree about a tensor.
    """
    tensors, holders = _collect(all_held)
    problems = [problem for key, boxes in holders.items() if (problem := _incomplete(tensors[key], boxes)) is not None]
    if problems:
        raise CheckpointError(f"the ranks' tensors do not make up whole ones: {'; '.join(problems[:5])}")
    chosen = _spread(tensors, holders, len(all_held))
    numbers: list[list[int]] = []
    writers: list[list[MetadataIndex]] = []
    for rank, held in enumerate(all_held):
        boxes = ((part.key, box) for part in held for box in part.boxes)
        mine = [(number, key, box) for number, (key, box) in enumerate(boxes) if chosen[key][box] == rank]
        numbers.append([number for number, _, _ in mine])
        writers.append([MetadataIndex(key, offsets) for _, key, (offsets, _) in mine])
    metadata = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=first.dtype),
            size=torch.Size(first.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes in holders[key]
            ],
        )
        for key, first in tensors.items()
    }
    return numbers, Whole(tensors=metadata, writers=writers)


_Holders = dict[str, dict[Cut, list[int]]]


def _collect(all_held: Sequence[Sequence[Held]]) -> tuple[dict[str, Held], _Holders]:
    """Each tensor as the first rank describes it, and who holds which of its boxes."""
    tensors: dict[str, Held] = {}
    holders: _Holders = {}
    for rank, held in enumerate(all_held):
        for part in held:
            first = tensors.setdefault(part.key, part)
            if (first.shape, first.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"rank {rank} has {part.key} of shape {part.shape} and {part.dtype}, another rank of shape "
                    f"{first.shape} and {first.dtype}; a tensor is the same on all ranks"
                )
            boxes = holders.setdefault(part.key, {})
            for box in part.boxes:
                boxes.setdefault(box, []).append(rank)
    return tensors, holders


def _incomplete(tensor: Held, boxes: Mapping[Cut, Sequence[int]]) -> str | None:
    if not boxes:
        return f"no rank has a part of {tensor.key}"
    elements = sum(math.prod(sizes) for _, sizes in boxes)
    if elements != math.prod(tensor.shape):
        return f"the ranks have {elements} elements of {tensor.key} of shape {tensor.shape}"
    overlap = find_overlap(tensor.shape, list(boxes))
    return None if overlap is None else f"{tensor.key} has boxes that overlap: {overlap[0]} and {overlap[1]}"


def _spread(tensors: Mapping[str, Held], holders: _Holders, size: int) -> dict[str, dict[Cut, int]]:
    """The writer of each box: the holder that has the least to write so far."""
    load = [0] * size
    chosen: dict[str, dict[Cut, int]] = {key: {} for key in holders}
    order = []
    for key, boxes in holders.items():
        for box, ranks in boxes.items():
            able = ranks[:1] if tensors[key].first_counts else ranks
            order.append((len(able) > 1, -math.prod(box[1]) * tensors[key].dtype.itemsize, key, box, able))
    # What only one rank can write comes first, then the largest: the rest evens the ranks out.
    order.sort(key=lambda entry: entry[:2])
    for _, negative_bytes, key, box, able in order:
        writer = min(able, key=load.__getitem__)
        load[writer] += _OVERHEAD_BYTES - negative_bytes
        chosen[key][box] = writer
    return chosen


def _check_savable(key: str, tensor: Any) -> None:
    if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
        what = "on the meta device and has no values" if tensor.is_meta else f"a {tensor.layout} tensor"
        raise CheckpointError(f"{key} is {what}; only dense tensors with values can be saved")


def _signature(tensor: Any) -> Any:
    """What the boxes of a tensor depend on, found faster than the boxes."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    if isinstance(tensor, Tensor):
        return tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta
    return _held("", tensor, False)


def _held(key: str, tensor: Any, first_counts: bool) -> Held:
    if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Held(key, shape, tensor.dtype, (((0,) * len(shape), shape),), first_counts)
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return Held(key, tuple(tensor.shape), tensor.dtype, (), first_counts)
    items = tensor.__create_write_items__(key, tensor)
    shape = tuple(tensor.size())
    boxes = tuple(
        (tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for item in items
        # A rank beyond the last row has an empty box, which only a tensor without elements needs.
        if item.tensor_data.chunk.sizes.numel() > 0 or 0 in shape
    )
    dtype = items[0].tensor_data.properties.dtype if items else tensor.dtype
    return Held(key, shape, dtype, boxes, first_counts)
