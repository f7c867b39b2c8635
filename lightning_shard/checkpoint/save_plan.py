"""Planning which rank writes which boxes, and checking that the boxes make up full tensors.

Every rank sends rank 0 its boxes as numbers. One rank alone sends a tensor's name, shape and dtype. Rank 0 gives each
box to one of the ranks that have it, so that all write about the same number of bytes. The plan is kept until tensors
are sharded in another way. The digests of frozen weights that a checkpoint leaves out are divided by the same plan.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.files.boxes import Integers, PlannedBoxes, TensorFacts, covered_once
from lightning_shard.checkpoint.files.layout import SlotName
from lightning_shard.checkpoint.files.tensor_files import ReadBox, chunks_of
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import INTEGERS

# Bytes that torch.save adds to the values of a box.
_OVERHEAD_BYTES = 1600


class LocalBoxes(NamedTuple):
    """The boxes of one rank, in its own order, as it sends them."""

    names: NDArray[np.uint64]  # 64-bit hash of each tensor's facts
    counts: Integers  # number of boxes of each tensor
    boxes: Integers  # (boxes, 2, dims): offsets and sizes, padded with 0 and 1 behind a tensor's own dims


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    mine: Sequence[dcp.MetadataIndex]  # the boxes that this rank writes, in this order
    of_all: PlannedBoxes | None  # on rank 0 alone


class SavePlanner:
    """Plans saves, and keeps the last plan for the next save of tensors that are sharded in the same way."""

    def __init__(self) -> None:
        self._facts: tuple[TensorFacts, ...] = ()
        self._boxes: list[list[dcp.ChunkStorageMetadata]] = []
        self._signature: tuple[Any, ...] | None = None
        self._plan: SavePlan | None = None

    def is_unchanged(self, tensors: Mapping[str, Any], slots: Mapping[str, SlotName]) -> bool:
        """Take in this rank's tensors and return whether its part of the last plan still holds. CheckpointError: a
        tensor that can't be saved.
        """
        signature = tuple((key, _signature(tensor)) for key, tensor in tensors.items())
        if self._plan is not None and signature == self._signature:
            return True
        for key, tensor in tensors.items():
            if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
                kind = "on the meta device and has no values" if tensor.is_meta else f"a {tensor.layout} tensor"
                raise CheckpointError(f"{key} is {kind}; only dense tensors with values can be saved")
        self._facts = tuple(TensorFacts(k, tuple(t.shape), t.dtype, slots.get(k)) for k, t in tensors.items())
        self._boxes = [_boxes_of(tensor) for tensor in tensors.values()]
        self._signature, self._plan = signature, None
        return False

    def agree_on_plan(self, ranks: Ranks, *, is_unchanged: bool) -> SavePlan:
        """Return the plan for the tensors that ranks took in last. All ranks call it with one ``is_unchanged``: the
        last plan holds on every rank.
        """
        if is_unchanged and self._plan is not None:
            return self._plan
        by_rank: list[LocalBoxes] = []
        made: list[PlannedBoxes] = []

        def first_of_each(found: list[LocalBoxes]) -> list[Integers]:
            by_rank.extend(found)
            return who_describes(found)

        def decide(described: list[list[TensorFacts]]) -> list[Integers]:
            numbers, plan = divide_boxes([facts for part in described for facts in part], by_rank)
            made.append(plan)
            return numbers

        wanted = ranks.exchange("planning the save", lambda: local_boxes(self._facts, self._boxes), first_of_each)
        numbers = ranks.exchange("planning the save", lambda: [self._facts[number] for number in wanted], decide)
        own = [(facts.key, box) for facts, boxes in zip(self._facts, self._boxes, strict=True) for box in boxes]
        mine = [dcp.MetadataIndex(own[number][0], own[number][1].offsets) for number in numbers.tolist()]
        self._plan = SavePlan(mine=mine, of_all=made[0] if made else None)
        return self._plan


def live_values(tensors: Mapping[str, Any]) -> ReadBox:
    """Read boxes from live tensors, each at the time of the call."""
    return lambda index: find_tensor_shard(tensors[index.fqn], index).detach()


def local_boxes(tensors: Sequence[TensorFacts], boxes: Sequence[Sequence[dcp.ChunkStorageMetadata]]) -> LocalBoxes:
    dims = max((len(facts.shape) for facts in tensors), default=0)
    rows = [
        [[*box.offsets, *[0] * (dims - len(box.offsets))], [*box.sizes, *[1] * (dims - len(box.sizes))]]
        for part in boxes
        for box in part
    ]
    return LocalBoxes(
        names=np.array([_name(facts) for facts in tensors], dtype=np.uint64),
        counts=np.array([len(part) for part in boxes], dtype=np.int64),
        boxes=np.array(rows, dtype=np.int64).reshape(len(rows), 2, dims),
    )


def _name(facts: TensorFacts) -> int:
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")


def who_describes(by_rank: Sequence[LocalBoxes]) -> list[Integers]:
    """Return by rank the numbers of its tensors that no earlier rank has. It sends rank 0 the facts of these."""
    starts = np.cumsum([0, *(len(local.names) for local in by_rank)])
    _, first = np.unique(np.concatenate([local.names for local in by_rank]), return_index=True)
    first.sort()
    cuts = np.searchsorted(first, starts)
    return [first[cuts[rank] : cuts[rank + 1]] - starts[rank] for rank in range(len(by_rank))]


def divide_boxes(
    described: Sequence[TensorFacts], by_rank: Sequence[LocalBoxes]
) -> tuple[list[Integers], PlannedBoxes]:
    """Give every box of the ``described`` tensors to one rank. ``by_rank``: the boxes of each rank.

    Returned: by rank the numbers of the boxes that it writes, among all that it has, and all boxes that are written.
    CheckpointError: the boxes do not make up full tensors, or ranks disagree about a tensor.
    """
    by_key: dict[str, TensorFacts] = {}
    for facts in described:
        first = by_key.setdefault(facts.key, facts)
        if first != facts:
            owner = next(rank for rank, local in enumerate(by_rank) if _name(facts) in local.names)
            raise CheckpointError(
                f"rank {owner} has {facts.key} of shape {facts.shape} and {facts.dtype}, another rank of shape "
                f"{first.shape} and {first.dtype}; a tensor is the same on all ranks"
            )
    tensors = [by_key[key] for key in sorted(by_key)]
    number_of = {_name(facts): number for number, facts in enumerate(tensors)}
    names, index = np.unique(np.concatenate([local.names for local in by_rank]), return_inverse=True)
    numbers = np.array([number_of[name] for name in names.tolist()], dtype=np.int64)[index]
    tensor = np.repeat(numbers, np.concatenate([local.counts for local in by_rank]))
    owned = [len(local.boxes) for local in by_rank]
    rank = np.repeat(np.arange(len(by_rank)), owned)
    dims = max(local.boxes.shape[2] for local in by_rank)
    # Pad the boxes of ranks that have fewer dims.
    more = [np.tile([[[0], [1]]], (len(local.boxes), 1, dims - local.boxes.shape[2])) for local in by_rank]
    wide = [np.concatenate([local.boxes, own], axis=2) for local, own in zip(by_rank, more, strict=True)]
    boxes = np.concatenate(wide)
    chosen = _choose(tensors, tensor, rank, boxes, len(by_rank))
    mine = [np.flatnonzero(part) for part in np.split(chosen, np.cumsum(owned)[:-1])]
    number = np.concatenate([np.arange(len(part)) for part in mine])
    rank, tensor, boxes = rank[chosen], tensor[chosen], boxes[chosen]
    order = np.argsort(tensor, kind="stable")
    parts = np.split(order, np.searchsorted(tensor[order], np.arange(1, len(tensors))))
    tables = []
    for facts, part in zip(tensors, parts, strict=False):  # without tensors there is one empty part
        bounds = boxes[part, :, : len(facts.shape)].reshape(len(part), 2 * len(facts.shape))
        tables.append((facts, np.column_stack([rank[part], number[part], 0 * part, bounds])))
    return mine, PlannedBoxes(tables=tables)


def _choose(
    tensors: Sequence[TensorFacts], tensor: Integers, rank: Integers, boxes: Integers, size: int
) -> NDArray[np.bool_]:
    """Mark the boxes of all ranks that are written: each different one once."""
    order = np.argsort(tensor, kind="stable")
    ends = np.searchsorted(tensor[order], np.arange(len(tensors) + 1))
    chosen = np.zeros(len(tensor), dtype=bool)
    load = np.zeros(size, dtype=np.int64)  # bytes that each rank has to write so far
    shared: list[tuple[int, Integers]] = []  # bytes and rows of each box that several ranks have
    problems: list[str] = []
    for number, facts in enumerate(tensors):
        rows = order[ends[number] : ends[number + 1]]
        by_box, firsts = _group_equal(facts.shape, boxes[rows])
        rows = rows[by_box]
        if problem := _incomplete(facts, boxes[rows[firsts]][:, :, : len(facts.shape)]):
            problems.append(problem)
            continue
        cost = np.prod(boxes[rows[firsts], 1], axis=1) * facts.dtype.itemsize + _OVERHEAD_BYTES
        single = np.diff(firsts, append=len(rows)) == 1  # boxes of one rank alone come first
        chosen[rows[firsts[single]]] = True
        np.add.at(load, rank[rows[firsts[single]]], cost[single])
        if not single.all():
            groups = np.split(rows, firsts[1:])
            shared += [(int(cost[group]), groups[group]) for group in np.flatnonzero(~single)]
    if problems:
        raise CheckpointError(f"the ranks' tensors do not make up full ones: {'; '.join(problems[:5])}")
    for each, rows in sorted(shared, key=lambda entry: -entry[0]):  # the largest first, the rest evens the ranks out
        row = rows[np.argmin(load[rank[rows]])]
        chosen[row] = True
        load[rank[row]] += each
    return chosen


def _group_equal(shape: tuple[int, ...], boxes: Integers) -> tuple[Integers, Integers]:
    """Sort a tensor's boxes so that equal ones are neighbours. Returned: the order, and each group's first position."""
    strides = np.ones(boxes.shape[2], dtype=np.int64)
    strides[: len(shape)] = [math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape))]
    begin = boxes[:, 0] @ strides
    end = begin + np.maximum(boxes[:, 1] - 1, 0) @ strides
    order = np.lexsort((end, begin))
    differs = (np.diff(begin[order]) != 0) | (np.diff(end[order]) != 0)
    return order, np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), dtype=bool), differs]))


def _incomplete(facts: TensorFacts, boxes: Integers) -> str | None:
    """Say why different boxes, shape ``(boxes, 2, dims)``, do not make up a tensor. None if they do."""
    if not len(boxes):
        return f"no rank has a part of {facts.key}"
    elements = int(np.prod(boxes[:, 1], axis=1).sum())
    if elements != math.prod(facts.shape):
        return f"the ranks have {elements} elements of {facts.key} of shape {facts.shape}"
    return None if covered_once(facts.shape, boxes[:, 0], boxes[:, 1]) else f"{facts.key} has boxes that overlap"


def _signature(tensor: Any) -> Any:
    """Return the facts that a tensor's boxes depend on. They are found faster than the boxes."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    if isinstance(tensor, Tensor):
        return tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta
    return tuple(tensor.shape), tensor.dtype, _boxes_of(tensor)


def _boxes_of(tensor: Any) -> list[dcp.ChunkStorageMetadata]:
    # A rank beyond the last row has an empty box. Only a tensor without elements needs it.
    return [chunk for chunk in chunks_of(tensor) if chunk.sizes.numel() > 0 or 0 in tensor.shape]


_ELEMENTS = 1 << 20  # in memory as int64 at a time


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each tensor to its digest, on every rank. All ranks call it with their parts of the tensors.

    A digest has shape, dtype and 64 bits of a sum over all elements, each read by one rank: its bits times a number
    made from its position. It detects other weights, not an attack.
    """
    ranks, planner = Ranks.of(), SavePlanner()
    ranks.agree("looking at frozen parameters", lambda: planner.is_unchanged(tensors, {}))
    mine, values = planner.agree_on_plan(ranks, is_unchanged=False).mine, live_values(tensors)

    def own_sums() -> dict[str, int]:
        sums = dict.fromkeys(tensors, 0)
        for index in mine:
            sums[index.fqn] += _sum(values(index), tuple(index.offset or ()), tuple(tensors[index.fqn].shape))
        return sums

    def total(parts: list[dict[str, int]]) -> list[dict[str, str]]:
        known = {
            name: f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')} "
            f"{sum(part[name] for part in parts) % 2**64:016x}"
            for name, tensor in tensors.items()
        }
        return [known] * ranks.size

    return ranks.exchange("reading frozen parameters", own_sums, total)


@torch.no_grad()
def _sum(box: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    if box.is_complex():
        box, offsets, shape = torch.view_as_real(box.resolve_conj()), (*offsets, 0), (*shape, 2)
    bits = (box.reshape(1) if box.ndim == 0 else box.contiguous()).view(INTEGERS[box.element_size()])
    offsets, shape = offsets or (0,), shape or (1,)
    rows = max(1, _ELEMENTS // max(1, bits[:1].numel()))
    found = 0
    for first in range(0, len(bits), rows):
        part = bits[first : first + rows].to(torch.int64)
        position = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape):
            start = offsets[dim] + (first if dim == 0 else 0)
            along = torch.arange(start, start + size, dtype=torch.int64, device=part.device)
            position = position.unsqueeze(-1) * shape[dim] + along
        position = (position + 1) * -0x61C8864680B583EB  # 2^64 over the golden ratio, then mixed as by splitmix64
        position = (position ^ (position >> 31)) * -0x6B2FB644ECCEEE15
        found += int((part * (position ^ (position >> 29))).sum())
    return found
