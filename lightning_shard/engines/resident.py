"""The tensors that a rank holds in a fit, by what they are for and where they lie: what memory accounts count.

Where tensors share memory, the one that is given first says what the memory is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.engines._fsdp2 import cut_parameters, gathered_tensors, offloaded_parameters, whole_gradients


class Held(NamedTuple):
    """A live tensor, or a number of bytes that no tensor of Python's stands for."""

    kind: str
    """One of `lightning_shard.memory.KINDS`."""

    place: str
    """"device", "host" or "nvme"."""

    tensor: Tensor | int


def place_of(tensor: Tensor, device: torch.device) -> str:
    """Where a tensor lies that no engine has put aside: "host" if the run computes elsewhere."""
    return "host" if tensor.device.type == "cpu" and device.type != "cpu" else "device"


def module_tensors(
    module: nn.Module, optimizers: Iterable[Optimizer], *, device: torch.device, wrapped: nn.Module | None = None
) -> Iterator[Held]:
    """What a module holds that is whole, or that FSDP2 has cut.

    Args:
        module: its tensors on this rank.
        optimizers: over the module's parameters.
        device: where this rank computes.
        wrapped: torch's DDP around ``module``, if there is one.
    """
    offloaded = offloaded_parameters(module)

    def place(parameter: Tensor, tensor: Tensor) -> str:
        return "host" if parameter in offloaded else place_of(tensor, device)

    # First, because gathered parameters stand in the module in place of their shards.
    yield from gathered(module, device=device)
    parameters = [*cut_parameters(module), *module.parameters()]
    yield from (Held("parameters", place(p, p), p) for p in parameters)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            yield Held("gradients", place(parameter, parameter.grad), parameter.grad)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from (Held("gradients", place_of(g, device), g) for _, _, g in whole_gradients(part))
    yield from optimizer_tensors(optimizers, place)
    yield from buffers(module, device=device)
    if isinstance(wrapped, DistributedDataParallel) and not wrapped.gradient_as_bucket_view:
        # The buckets are C++'s: each trainable parameter has its place in one of them, from the start.
        yield Held("communication", "device", sum(p.nbytes for p in module.parameters() if p.requires_grad))


def optimizer_tensors(optimizers: Iterable[Optimizer], place: Callable[[Tensor, Tensor], str]) -> Iterator[Held]:
    """The optimizers' state; ``place(stepped, slot)`` says where a slot of a stepped tensor lies."""
    for optimizer in optimizers:
        for stepped, slots in optimizer.state.items():
            yield from (Held("optimizer", place(stepped, slot), slot) for slot in tensors_in(slots))


def buffers(module: nn.Module, *, device: torch.device) -> Iterator[Held]:
    """Buffers, and the states of torchmetrics, which are no buffers."""
    yield from (Held("buffers", place_of(b, device), b) for b in module.buffers())
    for part in module.modules():
        if isinstance(part, Metric):
            yield from (Held("buffers", place_of(t, device), t) for t in tensors_in(part.metric_state))


def gathered(module: nn.Module, *, device: torch.device) -> Iterator[Held]:
    """What is whole of FSDP2's parameters at this moment."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from (Held("gathered", "device", tensor) for tensor in gathered_tensors(part))


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in nested mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 0 and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth > 0 and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth > 0 and hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value), depth - 1)
