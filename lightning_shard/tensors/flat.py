"""Tensors whose slices lie in flat memory, and optimizers that step such memory.

An engine that flattens parameters and divides them over the ranks (ZeRO) leaves each rank contiguous row-major slices
of some. Such a slice is a handful of axis-aligned boxes, which torch.distributed.checkpoint stores. Each is contiguous
in the slice, so a view of the flat memory is the box's tensor, read and written in place.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Box:
    """An axis-aligned part of a tensor that is contiguous in the tensor's row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # First element in the slice that it is a part of.


def boxes(shape: Sequence[int], start: int, length: int) -> list[Box]:
    """Elements ``[start, start + length)`` of a tensor's row-major order as boxes, in that order. ValueError: outside.
    There are at most ``2 * len(shape) - 1``: the end of one row, full rows and the beginning of another row, likewise
    within these two partial rows. An empty slice has no box.
    """
    if start < 0 or length < 0 or start + length > math.prod(shape):
        raise ValueError(f"elements [{start}, {start + length}) are not all in a tensor of shape {tuple(shape)}")
    found: list[Box] = []
    _append_boxes(tuple(shape), start, start + length, (), start, found)
    return found


def _append_boxes(
    shape: tuple[int, ...], begin: int, end: int, prefix: tuple[int, ...], origin: int, found: list[Box]
) -> None:
    """Append the boxes of ``[begin, end)`` of the sub-tensor at ``prefix``. The slice begins at ``origin`` in it."""
    if begin == end:
        return
    if not shape:
        found.append(Box(offsets=prefix, sizes=(1,) * len(prefix), start=begin - origin))
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows in [first, last) are full
    if first > last:  # inside one row
        _append_boxes(shape[1:], begin - last * row, end - last * row, (*prefix, last), origin - last * row, found)
        return
    if begin < first * row:
        before = (first - 1) * row
        _append_boxes(shape[1:], begin - before, row, (*prefix, first - 1), origin - before, found)
    if first < last:
        offsets = (*prefix, first, *(0 for _ in shape[1:]))
        sizes = (*(1 for _ in prefix), last - first, *shape[1:])
        found.append(Box(offsets=offsets, sizes=sizes, start=first * row - origin))
    if last * row < end:
        _append_boxes(shape[1:], 0, end - last * row, (*prefix, last), origin - last * row, found)


@dataclass(frozen=True)
class FlatSlice:
    """Live flat memory that is a contiguous row-major slice of a tensor."""

    data: Tensor  # 1-D, contiguous, written to by loading a checkpoint.
    start: int  # First element of the slice in the tensor's row-major order.


class BoxTensor:
    """This rank's boxes of a tensor of ``shape``, by their offsets, with DCP's protocol of checkpointable tensors."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Mapping[tuple[int, ...], Tensor]) -> None:
        self.shape, self.dtype, self._pieces = torch.Size(shape), dtype, dict(pieces)

    @property
    def views(self) -> list[Tensor]:
        return list(self._pieces.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=box.shape) for at, box in self._pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[tuple(index.offset)]


class FlatTensor(BoxTensor):
    """This rank's slices of a tensor, if any. All ranks' slices together, some maybe equal, have all elements."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, slices: Iterable[FlatSlice]) -> None:
        pieces: dict[tuple[int, ...], Tensor] = {}
        end = 0
        for part in sorted(slices, key=lambda part: part.start):
            data = part.data.detach()
            form = (data.ndim, data.is_contiguous(), data.dtype)
            assert form == (1, True, dtype), f"a slice of a flat {dtype} tensor is {form}"
            assert part.start >= end, f"slices overlap: one begins at {part.start}, the one before ends at {end}"
            for box in boxes(shape, part.start, data.numel()):
                pieces[box.offsets] = data[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
            end = part.start + data.numel()
        if math.prod(shape) == 0:
            # No slice has elements of an empty tensor, but a checkpoint has the tensor. Any rank can write it.
            pieces = {(0,) * len(shape): torch.empty(tuple(shape), dtype=dtype)}
        super().__init__(shape, dtype, pieces)


LiveTensor = Tensor | FlatTensor
"""This rank's part of a tensor: a plain tensor (full, equal on all ranks), a DTensor, or slices in flat memory."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype of a tensor's bits, by the bytes of an element."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part: the local shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, kw_only=True)
class FlatMember:
    """The place of a parameter's slice in this rank's flat tensor."""

    fqn: str
    shape: Sequence[int]  # The full parameter's shape.
    offset: int = 0  # First element of the slice in the flat tensor.
    start: int = 0  # First element of the slice in the parameter's row-major order.
    length: int = 0  # Elements of the slice, 0 if this rank's flat tensor has none of the parameter.
    stepped: bool = True  # False if no rank's flat tensor has the group's parameter (frozen), which has no state.

    def view(self, flat: Tensor) -> FlatTensor:
        """The slice of the parameter, or of its slot, in this rank's flat tensor, as a view."""
        part = flat.detach().narrow(0, self.offset, self.length)
        return FlatTensor(self.shape, flat.dtype, [FlatSlice(part, self.start)])


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGroup:
    """A flat tensor that an optimizer steps, and the parameters whose slices lie in it."""

    flat: Tensor  # 1-D, the key in the optimizer's ``state``. It may be empty and have padding anywhere.
    members: tuple[FlatMember, ...]  # The same names, shapes and order on every rank.
    # The live parameter group with the hyperparameters. Flat groups may share one: their members follow each other in
    # its list of parameters.
    group: dict[str, Any]
    # Makes a zero tensor like ``flat`` for the slot of this name if slots are in files. None: slots are in memory.
    new_slot: Callable[[str], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatOptimizer:
    """An optimizer that steps flat tensors. Its ``param_groups[i]["params"]`` is never read."""

    optimizer: Optimizer
    groups: Sequence[FlatGroup]  # In the order of the parameter groups.


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A tensor of an optimizer's state, of any shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedParameter:
    """A sharded parameter that one rank steps in full."""

    fqn: str
    shape: tuple[int, ...]  # The full parameter's.
    group: dict[str, Any]  # The live parameter group with the hyperparameters.
    tensor: Tensor | None  # The key in the optimizer's ``state``, on the owner.


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedOptimizer:
    """Steps full parameters at owner ranks. Every rank has all ``parameters``, ``slots`` and ``values``."""

    optimizer: Optimizer
    parameters: Sequence[OwnedParameter]  # In the order of the parameter groups.
    slots: Mapping[str, Mapping[str, Slot]]  # FQN to the tensors of its state on its owner.
    values: Mapping[str, Mapping[str, Any]]  # FQN to the state without tensors.


AnyOptimizer = Optimizer | FlatOptimizer | OwnedOptimizer
"""An optimizer of a module's parameters (plain or DTensors), of flat tensors with their slices, or of full parameters
whose shards are on other ranks."""


def plain_slots(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state, in which a tensor subclass is replaced by its inner tensors: ``exp_avg.codes``."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if has_tensors_inside(value):
            inside, _ = value.__tensor_flatten__()
            found |= plain_slots({f"{name}.{each}": getattr(value, each) for each in inside})
        else:
            found[name] = value
    return found


def has_tensors_inside(value: Any) -> bool:
    """Whether it is a tensor subclass with inner tensors, such as a quantised one, but no DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)


def torch_optimizer(optimizer: AnyOptimizer) -> Optimizer:
    return optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer
