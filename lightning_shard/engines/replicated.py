"""Tensors that are full on every rank: equal at the start, and reduced by plain all-reduces where no engine does."""

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
    """Give every rank the values of rank 0, in place, but for DTensors and meta tensors. All ranks call it."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) or tensor.is_meta or tensor.numel() == 0:
            continue
        data = tensor.detach()
        sent = reachable(data.contiguous())  # it is on the host after a fit
        # As bytes: NCCL has no int16 and no unsigned integers (ProcessGroupNCCL's ``ncclDataType``).
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
        if sent is not data:
            data.copy_(sent)


_COMPARED = 3  # Times that buffers are shared at which ranks tell each other their shapes.


class SharedBuffers:
    """Gives every rank the buffers of rank 0, persistent or not, as torch's DDP does ahead of a step: a codebook, a
    queue of keys, running statistics. Buffers that differ in shape or dtype between ranks, or change either after the
    first steps, are left alone.
    """

    def __init__(self, root: nn.Module) -> None:
        """Look where ``root`` has buffers; forward may put others into their places."""
        self._places = [(module, name) for module in root.modules() for name, _ in module.named_buffers(recurse=False)]
        self._compared = 0
        self._agreed: list[tuple[nn.Module, str, Any]] = []  # With what all ranks have there.
        self._sent: Sequence[Tensor] = []  # The bytes of each.

    @torch.no_grad()
    def share(self) -> None:
        """All ranks call it; after the first times one broadcast, and no wait for a device."""
        if not self._places or dist.get_world_size() == 1:
            return
        if self._compared < _COMPARED:
            self._agree()
        if not self._agreed:
            return
        buffers = [getattr(module, name) for module, name, _ in self._agreed]
        same = [_like(b) == like for b, (_, _, like) in zip(buffers, self._agreed, strict=True)]
        own = [b.reshape(-1).view(torch.uint8) if s else d for b, s, d in zip(buffers, same, self._sent, strict=True)]
        sent = torch.cat([reachable(data) for data in own])  # Some may lie on the host.
        dist.broadcast(sent, src=0)
        self._sent = sent.split([data.numel() for data in own])
        for buffer, is_same, data in zip(buffers, same, self._sent, strict=True):
            if is_same and dist.get_rank() != 0:
                buffer.copy_(data.view(buffer.dtype).view(buffer.shape))

    def _agree(self) -> None:
        likes = [_like(getattr(module, name)) for module, name in self._places]
        of_ranks = Ranks.of().gather(likes)
        shared = [i for i, like in enumerate(likes) if like and all(other[i] == like for other in of_ranks)]
        # The widest first, so that each begins at a multiple of its elements' size.
        shared.sort(key=lambda i: -likes[i][1].itemsize)
        self._agreed = [(*self._places[i], likes[i]) for i in shared]
        self._sent = [torch.empty(0, dtype=torch.uint8)] * len(shared)
        self._compared += 1


def _like(buffer: Any) -> Any:
    """Shape, dtype and device's type of a buffer that can be shared, else None."""
    if not isinstance(buffer, Tensor) or isinstance(buffer, DTensor) or not buffer.numel() or buffer.is_sparse:
        return None
    return tuple(buffer.shape), buffer.dtype, buffer.device.type


@contextmanager
def common_random_numbers(shard: int = 0) -> Generator[None, None, None]:
    """Let all ranks draw the same numbers inside, but for each ``shard`` others. All ranks call it; their own
    generators go on as if nothing had been drawn, but for the seed, which is rank 0's.
    """
    seed = Ranks.of().broadcast(int(torch.randint(2**62, ())))
    with fork_rng():
        torch.manual_seed(seed + shard)
        yield


@torch.no_grad()
def parted(replicas: Iterable[Tensor], group: dist.ProcessGroup) -> list[int]:
    """Which of these tensors differ between the ranks of ``group``, by the sum of their bits. All ranks call it."""
    own = [local(t) for t in replicas]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in own]
    # What is offloaded is on the host, and full tensors beside it are not.
    sums = [reachable(t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64), group) for t in real]
    if not sums:
        return []
    # The largest, and less than the smallest: ~x is -x - 1.
    sent = torch.stack([torch.stack(sums), ~torch.stack(sums)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    return (sent[0] != ~sent[1]).nonzero().flatten().tolist()


@contextmanager
def full_parameters_apart(optimizer: Optimizer) -> Generator[None, None, None]:
    """For a step, put full parameters into groups of their own: torch's kernels over lists of tensors (``foreach``,
    ``fused``) take no list of them and shards. Outside, where hooks, schedules and checkpoints see them, groups are as
    the user made them.
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
    """Average gradients over all ranks, which call it, in ``reduce_dtype``; a lacking one is zero if a rank has it.
    ``new``: of the parameters whose gradient was not averaged yet on this rank; None: all.
    """
    parameters = list(parameters)
    if not parameters:
        return
    # On the host: no device is waited for.
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
