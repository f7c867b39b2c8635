"""Tensors that are full on every rank: broadcast at the start, and averaged if the engine's library does not."""

from collections import defaultdict
from collections.abc import Container, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.devices import fork_rng
from lightning_shard.ranks import Ranks, reachable
from lightning_shard.tensors.flat import INTEGERS, local


@torch.no_grad()
def broadcast_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values to every rank in place, except DTensors and meta tensors. All ranks call it."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) or tensor.is_meta or tensor.numel() == 0:
            continue
        data = tensor.detach()
        sent = reachable(data.contiguous())  # after a fit the data is on the host
        # As bytes, because NCCL has no int16 and no unsigned integers (ProcessGroupNCCL's ``ncclDataType``).
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
        if sent is not data:
            data.copy_(sent)


_COMPARED = 3  # The number of first broadcasts before which ranks compare their buffers' shapes.


class SharedBuffers:
    """Broadcasts rank 0's buffers before a step, persistent or not, as torch's DDP does: codebooks, queues of keys,
    running statistics. Buffers whose shape or dtype differs between ranks, or changes after the first steps, are left
    alone.
    """

    def __init__(self, root: nn.Module) -> None:
        """List the names of ``root``'s buffers. Forward may assign other tensors to them."""
        self._places = [(module, name) for module in root.modules() for name, _ in module.named_buffers(recurse=False)]
        self._compared = 0
        self._agreed: list[tuple[nn.Module, str, Any]] = []  # With the `_like` that all ranks have.
        self._sent: Sequence[Tensor] = []  # The last bytes of each.

    @torch.no_grad()
    def share(self) -> None:
        """Broadcast the buffers. All ranks call it. After the first times it is one broadcast without a device sync."""
        if not self._places or dist.get_world_size() == 1:
            return
        if self._compared < _COMPARED:
            self._agree()
        if not self._agreed:
            return
        buffers = [getattr(module, name) for module, name, _ in self._agreed]
        same = [_like(b) == like for b, (_, _, like) in zip(buffers, self._agreed, strict=True)]
        own = [b.reshape(-1).view(torch.uint8) if s else d for b, s, d in zip(buffers, same, self._sent, strict=True)]
        sent = torch.cat([reachable(data) for data in own])  # Some may be on the host.
        dist.broadcast(sent, src=0)
        self._sent = sent.split([data.numel() for data in own])
        for buffer, is_same, data in zip(buffers, same, self._sent, strict=True):
            if is_same and dist.get_rank() != 0:
                buffer.copy_(data.view(buffer.dtype).view(buffer.shape))

    def _agree(self) -> None:
        likes = [_like(getattr(module, name)) for module, name in self._places]
        of_ranks = Ranks.of().gather(likes)
        shared = [i for i, like in enumerate(likes) if like and all(other[i] == like for other in of_ranks)]
        # The widest dtype first, so that each buffer begins at a multiple of its element size.
        shared.sort(key=lambda i: -likes[i][1].itemsize)
        self._agreed = [(*self._places[i], likes[i]) for i in shared]
        self._sent = [torch.empty(0, dtype=torch.uint8)] * len(shared)
        self._compared += 1


def _like(buffer: Any) -> Any:
    """Shape, dtype and device type of a buffer that can be broadcast, else None."""
    if not isinstance(buffer, Tensor) or isinstance(buffer, DTensor) or not buffer.numel() or buffer.is_sparse:
        return None
    return tuple(buffer.shape), buffer.dtype, buffer.device.type


@contextmanager
def common_random_numbers(shard: int = 0) -> Generator[None, None, None]:
    """Let all ranks of one ``shard`` draw the same random numbers in this context. All ranks call it. Afterwards their
    generators continue as if nothing was drawn, except one seed.
    """
    seed = Ranks.of().broadcast(int(torch.randint(2**62, ())))
    with fork_rng():
        torch.manual_seed(seed + shard)
        yield


@torch.no_grad()
def differing_replicas(replicas: Iterable[Tensor], group: dist.ProcessGroup) -> list[int]:
    """Indices of the tensors whose sums of bits differ between the ranks of ``group``. All ranks call it."""
    own = [local(t) for t in replicas]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in own]
    # Offloaded tensors are on the host, others on the device.
    sums = [reachable(t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64), group) for t in real]
    if not sums:
        return []
    # The maximum, and the minimum by ~x, which is -x - 1.
    sent = torch.stack([torch.stack(sums), ~torch.stack(sums)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    return (sent[0] != ~sent[1]).nonzero().flatten().tolist()


@contextmanager
def full_parameters_in_own_groups(optimizer: Optimizer) -> Generator[None, None, None]:
    """Put full parameters into separate groups during a step: torch's kernels over lists of tensors (``foreach``,
    ``fused``) don't accept plain tensors and DTensors together. Hooks, schedules and checkpoints see the user's groups.
    """
    groups = optimizer.param_groups
    given = [(group, group["params"]) for group in groups]
    for group, parameters in given:
        full = [p for p in parameters if not isinstance(p, DTensor)]
        if full and len(full) < len(parameters):
            group["params"] = [p for p in parameters if isinstance(p, DTensor)]
            groups.append({**group, "params": full})
    try:
        yield
    finally:
        del groups[len(given) :]
        for group, parameters in given:
            group["params"] = parameters


@torch.no_grad()
def average_gradients(
    parameters: Iterable[Tensor], *, reduce_dtype: torch.dtype, new: Container[Tensor] | None = None
) -> None:
    """Average gradients over all ranks in ``reduce_dtype``. All ranks call it. A missing gradient counts as zero if
    another rank has it. ``new``: the parameters whose gradient was not averaged yet on this rank (None: all).
    """
    parameters = list(parameters)
    if not parameters:
        return
    # On the host, without a device sync.
    here = [p.grad is not None and (new is None or p in new) for p in parameters]
    present = torch.tensor(here, dtype=torch.uint8)
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
