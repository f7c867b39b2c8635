"""Full tensors gathered from what each rank has of them, and scattered back, whichever way an engine shards them."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.tensors.flat import FlatTensor, LiveTensor


@torch.no_grad()
def gather_full(live: LiveTensor, *, device: torch.device) -> Tensor:
    """A bitwise copy of the full tensor on every rank. All ranks call it; a `FlatTensor`'s is made on ``device``."""
    if isinstance(live, DTensor):
        return full_of(live).clone()
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
        live.to_local().copy_(own_part(value.to(live.device_mesh.device_type, live.dtype), live))
    elif isinstance(live, Tensor):
        live.copy_(value)
    else:
        for index, part in _boxes(live):
            part.copy_(value[index])


def full_of(tensor: DTensor) -> Tensor:
    """All of ``tensor`` on its mesh's device, which may share its memory where each rank has it. All ranks call it."""
    mesh, size, placed = tensor.device_mesh, tensor.shape, tensor.placements
    with torch.no_grad():
        # It moves an offloaded shard, which is on the host, where the mesh may have no backend; ``to`` reduces sums.
        part = tensor.to_local()
        return DTensor.from_local(part, mesh, placed, run_check=False, shape=size, stride=tensor.stride()).full_tensor()


def own_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a full tensor, the same on all ranks, sharded as ``like`` is. No communication."""
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _boxes(live: FlatTensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    for chunk in live.__create_chunk_list__():
        index = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        yield index, live.__get_tensor_shard__(MetadataIndex("", chunk.offsets))


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
