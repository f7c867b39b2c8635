"""Full tensors gathered from what each rank has of them, and scattered back, whichever way an engine shards them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_shard.tensors import flat
from lightning_shard.tensors.flat import AnyOptimizer, FlatOptimizer, FlatTensor, LiveTensor, OwnedOptimizer


@torch.no_grad()
def gather_full(live: LiveTensor, *, device: torch.device) -> Tensor:
    """A bitwise copy of the full tensor on every rank. All ranks call it; a `FlatTensor`'s is made on ``device``."""
    if isinstance(live, DTensor):
        # An offloaded shard is on the host, where the mesh may have no backend.
        moved: DTensor = live.detach().to(live.device_mesh.device_type)  # type: ignore[assignment]
        return moved.full_tensor().clone()
    if isinstance(live, Tensor):
        return live.detach().clone()
    full = torch.zeros(live.shape, dtype=live.dtype, device=device)
    for index, part in _boxes(live):
        full[index] = part.to(device)
    # Ranks that have an element have the same, replicas too, and the others zeros: the largest byte keeps every bit.
    if full.numel() > 0:
        dist.all_reduce(full.reshape(-1).view(torch.uint8), dist.ReduceOp.MAX)
    return full


@torch.no_grad()
def scatter_full(value: Tensor, live: LiveTensor) -> None:
    """Write a full tensor of this shape, the same on all ranks, into what this rank has. No communication."""
    if isinstance(live, DTensor):
        moved = value.to(live.device_mesh.device_type, live.dtype)
        sharded = distribute_tensor(moved, live.device_mesh, live.placements, src_data_rank=None)
        live.to_local().copy_(sharded.to_local())
    elif isinstance(live, Tensor):
        live.copy_(value)
    else:
        for index, part in _boxes(live):
            part.copy_(value[index])


def _boxes(live: FlatTensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    for chunk in live.__create_chunk_list__():
        index = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        yield index, live.__get_tensor_shard__(MetadataIndex("", chunk.offsets))


def optimizer_slot(optimizers: Sequence[AnyOptimizer], parameter: Tensor, fqn: str, slot: str) -> LiveTensor | None:
    """The state that an optimizer keeps of a parameter in ``slot`` ("exp_avg"); None where no optimizer has it."""
    for optimizer in optimizers:
        found: Any = None
        if isinstance(optimizer, FlatOptimizer):
            found = _flat_slot(optimizer, fqn, slot)
        elif isinstance(optimizer, OwnedOptimizer):
            found = _owned_slot(optimizer, fqn, slot)
        if isinstance(optimizer, Optimizer) and parameter in optimizer.state:
            found = flat.plain_slots(optimizer.state[parameter]).get(slot)
        if found is not None:
            return found if isinstance(found, Tensor | FlatTensor) else torch.as_tensor(found)
    return None


def _owned_slot(optimizer: OwnedOptimizer, fqn: str, slot: str) -> Any:
    for parameter in optimizer.parameters:
        if parameter.fqn == fqn and (facts := optimizer.slots.get(fqn, {}).get(slot)) is not None:
            state = {} if parameter.tensor is None else flat.plain_slots(optimizer.optimizer.state[parameter.tensor])
            return FlatTensor(facts.shape, facts.dtype, [flat.FlatSlice(state[slot].reshape(-1), 0)] if state else [])
    return optimizer.values.get(fqn, {}).get(slot)


def _flat_slot(optimizer: FlatOptimizer, fqn: str, slot: str) -> Any:
    for group in optimizer.groups:
        for member in group.members:
            if member.fqn != fqn or not member.stepped:
                continue
            value = optimizer.optimizer.state.get(group.flat, {}).get(slot)
            if value is not None:
                return member.view(value) if isinstance(value, Tensor) and value.shape == group.flat.shape else value
    return None


def to_host_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a small tensor to the host; the result waits for that copy alone, and gives it."""
    if tensor.device.type == "cpu":
        copy = tensor.detach().to("cpu", copy=True)
        return lambda: copy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    copied = torch.Event(tensor.device)
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read
