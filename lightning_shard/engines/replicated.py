"""Tensors that are full on every rank: equal at the start, and reduced by plain all-reduces where no engine does."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.ranks import Ranks
from lightning_shard.tensors.names import is_persistent


@torch.no_grad()
def broadcast_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0, in place. All ranks call it with the same tensors in the same order.

    DTensors (parameters that the user sharded) and meta tensors are left alone.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor) or tensor.is_meta or tensor.numel() == 0:
            continue
        data = tensor.detach()
        sent = data.contiguous()
        # As bytes: NCCL has no int16 and no unsigned integers (ProcessGroupNCCL's ``ncclDataType``).
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
        if sent is not data:
            data.copy_(sent)


def persistent_buffers(root: nn.Module) -> list[Tensor]:
    """The buffers of a checkpoint, each once; running statistics are among them, and differ between ranks."""
    found: dict[int, Tensor] = {}
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                found.setdefault(id(buffer), buffer)
    return list(found.values())


class SharedBuffers:
    """Gives every rank the persistent buffers of rank 0, as torch's DDP does ahead of a step.

    A codebook, or running statistics that a module computes with, are then the same on all engines. Others are left
    alone: masks and tables that follow from sizes, of which language models have many, some of each rank's own length.
    """

    def __init__(self, root: nn.Module) -> None:
        """Look where ``root`` has buffers; forward may put others into their places."""
        named = ((module, name) for module in root.modules() for name, _ in module.named_buffers(recurse=False))
        self._places = [(module, name) for module, name in named if is_persistent(module, name)]

    @torch.no_grad()
    def share(self) -> None:
        """All ranks call it; one broadcast, without a wait for a device."""
        found = {id(buffer): buffer for module, name in self._places if (buffer := getattr(module, name)) is not None}
        buffers = [buffer for buffer in found.values() if not isinstance(buffer, DTensor) and buffer.numel()]
        if not buffers or dist.get_world_size() == 1:
            return
        parts = [b.detach().contiguous().view(-1).view(torch.uint8) for b in buffers]
        flat = torch.cat(parts)
        dist.broadcast(flat, src=0)
        if dist.get_rank() != 0:
            for buffer, part in zip(buffers, flat.split([p.numel() for p in parts]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], *, reduce_dtype: torch.dtype) -> None:
    """Average the gradients of replicated parameters over all ranks, in ``reduce_dtype``. All ranks call it.

    A rank without a gradient counts as zero as long as another rank has one, so that ranks whose forward took
    different paths stay equal.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return
    # On the host: no device is waited for.
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=Ranks.of().group)
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype[parameter.dtype].append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1).to(reduce_dtype) for g in gradients])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
