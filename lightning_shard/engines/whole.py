"""Whole tensors from what each rank holds of them, and back, whichever way an engine has cut them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.checkpoint.flat_shard import FlatTensor

LiveTensor = Tensor | FlatTensor
"""A plain tensor (whole, equal on all ranks), a DTensor, or pieces of flat memory."""


@torch.no_grad()
def gather(live: LiveTensor, *, device: torch.device) -> Tensor:
    """A copy of the whole tensor on every rank, bit by bit. All ranks call it.

    Args:
        live: this rank's part.
        device: where collectives run, and where the copy of a tensor that is in pieces lies.
    """
    if isinstance(live, DTensor):
        # An offloaded shard is on the host, where the mesh may have no backend.
        placed: DTensor = live.detach().to(live.device_mesh.device_type)  # type: ignore[assignment]
        return placed.full_tensor().clone()
    if isinstance(live, Tensor):
        return live.detach().clone()
    whole = torch.zeros(live.shape, dtype=live.dtype, device=device)
    for index, part in _boxes(live):
        whole[index] = part.to(device)
    # Each element is on one rank, and the others have zeros: as bytes, so that a sum keeps every bit.
    if whole.numel() > 0:
        dist.all_reduce(whole.reshape(-1).view(torch.uint8))
    return whole


@torch.no_grad()
def scatter(value: Tensor, live: LiveTensor) -> None:
    """Write a whole tensor, equal on all ranks, into what this rank holds. No communication.

    Raises:
        ValueError: another shape.
    """
    if tuple(value.shape) != tuple(live.shape):
        raise ValueError(f"the value has shape {tuple(value.shape)}, the tensor {tuple(live.shape)}")
    if isinstance(live, DTensor):
        placed = value.to(live.device_mesh.device_type, live.dtype)
        cut = distribute_tensor(placed, live.device_mesh, live.placements, src_data_rank=None)
        live.to_local().copy_(cut.to_local())
    elif isinstance(live, Tensor):
        live.copy_(value)
    else:
        for index, part in _boxes(live):
            part.copy_(value[index])


def _boxes(live: FlatTensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    for chunk in live.__create_chunk_list__():
        index = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        yield index, live.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
