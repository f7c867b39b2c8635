"""Full tensors gathered from each rank's part and scattered back, for every way to shard."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.tensors.flat import FlatTensor, LiveTensor


@torch.no_grad()
def gather_full(live: LiveTensor, *, device: torch.device) -> Tensor:
    """A bitwise copy of the full tensor on every rank, of a `FlatTensor` on ``device``. All ranks call it."""
    if isinstance(live, DTensor):
        return full_of(live).clone()
    if isinstance(live, Tensor):
        return live.detach().clone()
    full = torch.zeros(live.shape, dtype=live.dtype, device=device)
    for index, part in _boxes(live):
        full[index] = part.to(device)
    # Ranks that have an element agree on it, and the others have zeros, so the largest byte keeps every bit.
    if full.numel() > 0:
        dist.all_reduce(full.reshape(-1).view(torch.uint8), dist.ReduceOp.MAX)
    return full


@torch.no_grad()
def scatter_full(value: Tensor, live: LiveTensor) -> None:
    """Write a full tensor, equal on all ranks, into this rank's part ``live``. No communication."""
    if isinstance(live, DTensor):
        live.to_local().copy_(own_part(value.to(live.device_mesh.device_type, live.dtype), live))
    elif isinstance(live, Tensor):
        live.copy_(value)
    else:
        for index, part in _boxes(live):
            part.copy_(value[index])


def full_of(tensor: DTensor) -> Tensor:
    """The full ``tensor`` on its mesh's device, maybe in its memory if it is replicated. All ranks call it."""
    mesh, size, placed = tensor.device_mesh, tensor.shape, tensor.placements
    with torch.no_grad():
        # It moves an offloaded shard off the host, for which the mesh may have no backend. ``to`` would reduce sums.
        part = tensor.to_local()
        return DTensor.from_local(part, mesh, placed, run_check=False, shape=size, stride=tensor.stride()).full_tensor()


def own_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a full tensor, equal on all ranks, sharded as ``like`` is. No communication."""
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _boxes(live: FlatTensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    for chunk in live.__create_chunk_list__():
        index = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        yield index, live.__get_tensor_shard__(MetadataIndex("", chunk.offsets))


def to_host_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a small tensor to the host. The result waits for that copy alone and returns it."""
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
