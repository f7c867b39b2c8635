"""Which rank writes which boxes of which tensors, and whether the boxes make up full tensors.

Every rank tells rank 0 which boxes of which tensors it has. Rank 0 gives each box to one of the ranks that have it, so
that the bytes are evened out, and tells every rank its boxes by their numbers. Nothing here grows faster than the
boxes of all ranks do. A plan holds as long as no rank's tensors are sharded in another way, and is kept until then.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.files.boxes import covered_once
from lightning_shard.checkpoint.files.layout import SlotName
from lightning_shard.checkpoint.files.tensor_files import Values, chunks_of
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and sizes by dim.

# Of each box in a file, beside its values: the archive that torch.save makes of it.
_OVERHEAD_BYTES = 1600


class LocalTensor(NamedTuple):
    """Which boxes of a tensor one rank has, in values that are small when they are sent."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    slot: SlotName | None = None  # Of optimizer state, which it is.


@dataclass(frozen=True, kw_only=True)
class GlobalPlan:
    """What rank 0 knows of a plan."""

    tensors: Mapping[str, dcp.TensorStorageMetadata]
    writers: Sequence[Sequence[dcp.MetadataIndex]]  # By rank, the boxes that it writes, in this order.
    slots: Mapping[str, SlotName]  # Key of each tensor of optimizer state, on whichever rank, to what it is.
    # Places of the boxes in the last save, and the files that say them.
    described: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan that all ranks have agreed on."""

    mine: Sequence[dcp.MetadataIndex]  # The boxes that this rank writes, in this order.
    of_all: GlobalPlan | None  # None but on rank 0.


class Plans:
    """The plan of the last save, for the next one whose tensors are sharded in the same way."""

    def __init__(self) -> None:
        self._local: tuple[LocalTensor, ...] | None = None
        self._signature: tuple[Any, ...] | None = None
        self._plan: Plan | None = None

    def still_holds(self, tensors: Mapping[str, Any], slots: Mapping[str, SlotName]) -> bool:
        """Look at what this rank is to save; whether its part of the last plan still holds. No communication.

        Raises CheckpointError for what can't be saved.
        """
        signature = tuple((key, _signature(tensor)) for key, tensor in tensors.items())
        if self._plan is not None and signature == self._signature:
            return True
        for key, tensor in tensors.items():
            if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
                what = "on the meta device and has no values" if tensor.is_meta else f"a {tensor.layout} tensor"
                raise CheckpointError(f"{key} is {what}; only dense tensors with values can be saved")
        self._local = tuple(_local(key, tensor, slots.get(key)) for key, tensor in tensors.items())
        self._signature, self._plan = signature, None
        return False

    def agreed(self, ranks: Ranks, *, still_holds: bool) -> Plan:
        """The plan for what every rank has looked at. All ranks call it; ``still_holds``: on all of them."""
        if not still_holds or self._plan is None:
            self._plan = self._make(ranks)
        return self._plan

    def _make(self, ranks: Ranks) -> Plan:
        assert self._local is not None
        local, of_all = self._local, []

        def decide(by_rank: list[tuple[LocalTensor, ...]]) -> list[list[int]]:
            numbers, made = divide(by_rank)
            of_all.append(made)
            return numbers

        numbers = ranks.exchange("planning the save", lambda: local, decide)
        boxes = [dcp.MetadataIndex(part.key, offsets) for part in local for offsets, _ in part.boxes]
        return Plan(mine=[boxes[number] for number in numbers], of_all=of_all[0] if of_all else None)


def live_values(tensors: Mapping[str, Any]) -> Values:
    """The values as they are when they are asked for."""
    return lambda index: find_tensor_shard(tensors[index.fqn], index).detach()


def divide(by_rank: Sequence[Sequence[LocalTensor]]) -> tuple[list[list[int]], GlobalPlan]:
    """Give every box to one rank; ``by_rank``: what each rank has, in its own order.

    Returns by rank the numbers of the boxes that it writes, counted over all that it has; and the plan of all ranks.
    CheckpointError: the boxes do not make up full tensors, or ranks disagree about a tensor.
    """
    tensors, owners = _collect(by_rank)
    problems = [problem for key, boxes in owners.items() if (problem := _incomplete(tensors[key], boxes)) is not None]
    if problems:
        raise CheckpointError(f"the ranks' tensors do not make up full ones: {'; '.join(problems[:5])}")
    chosen = _spread(tensors, owners, len(by_rank))
    numbers: list[list[int]] = []
    writers: list[list[dcp.MetadataIndex]] = []
    for rank, local in enumerate(by_rank):
        boxes = ((part.key, box) for part in local for box in part.boxes)
        mine = [(number, key, box) for number, (key, box) in enumerate(boxes) if chosen[key][box] == rank]
        numbers.append([number for number, _, _ in mine])
        writers.append([dcp.MetadataIndex(key, offsets) for _, key, (offsets, _) in mine])
    metadata = {
        key: dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=first.dtype),
            size=torch.Size(first.shape),
            chunks=[
                dcp.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes in owners[key]
            ],
        )
        for key, first in tensors.items()
    }
    slots = {key: first.slot for key, first in tensors.items() if first.slot is not None}
    return numbers, GlobalPlan(tensors=metadata, writers=writers, slots=slots)


_Owners = dict[str, dict[Box, list[int]]]


def _collect(by_rank: Sequence[Sequence[LocalTensor]]) -> tuple[dict[str, LocalTensor], _Owners]:
    """Each tensor as the first rank describes it, and the ranks that have each of its boxes."""
    tensors: dict[str, LocalTensor] = {}
    owners: _Owners = {}
    for rank, local in enumerate(by_rank):
        for part in local:
            first = tensors.setdefault(part.key, part)
            if (first.shape, first.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"rank {rank} has {part.key} of shape {part.shape} and {part.dtype}, another rank of shape "
                    f"{first.shape} and {first.dtype}; a tensor is the same on all ranks"
                )
            boxes = owners.setdefault(part.key, {})
            for box in part.boxes:
                boxes.setdefault(box, []).append(rank)
    return tensors, owners


def _incomplete(tensor: LocalTensor, boxes: Mapping[Box, Sequence[int]]) -> str | None:
    if not boxes:
        return f"no rank has a part of {tensor.key}"
    elements = sum(math.prod(sizes) for _, sizes in boxes)
    if elements != math.prod(tensor.shape):
        return f"the ranks have {elements} elements of {tensor.key} of shape {tensor.shape}"
    begin, sizes = np.array(list(boxes), dtype=np.int64).reshape(len(boxes), 2, len(tensor.shape)).swapaxes(0, 1)
    return None if covered_once(tensor.shape, begin, sizes) else f"{tensor.key} has boxes that overlap"


def _spread(tensors: Mapping[str, LocalTensor], owners: _Owners, size: int) -> dict[str, dict[Box, int]]:
    """The writer of each box: of the ranks that have it the one that has the least to write so far."""
    load = [0] * size
    chosen: dict[str, dict[Box, int]] = {key: {} for key in owners}
    order = []
    for key, boxes in owners.items():
        for box, ranks in boxes.items():
            order.append((len(ranks) > 1, -math.prod(box[1]) * tensors[key].dtype.itemsize, key, box, ranks))
    # What only one rank can write comes first, then the largest: the rest evens the ranks out.
    order.sort(key=lambda entry: entry[:2])
    for _, negative_bytes, key, box, ranks in order:
        writer = min(ranks, key=load.__getitem__)
        load[writer] += _OVERHEAD_BYTES - negative_bytes
        chosen[key][box] = writer
    return chosen


def _signature(tensor: Any) -> Any:
    """What the boxes of a tensor depend on, found faster than the boxes."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    if isinstance(tensor, Tensor):
        return tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta
    return _local("", tensor, None)


def _local(key: str, tensor: Any, slot: SlotName | None) -> LocalTensor:
    shape = tuple(tensor.shape)
    # A rank beyond the last row has an empty box, which only a tensor without elements needs.
    chunks = (chunk for chunk in chunks_of(tensor) if chunk.sizes.numel() > 0 or 0 in shape)
    boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
    return LocalTensor(key, shape, tensor.dtype, boxes, slot)
