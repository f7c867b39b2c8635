"""List a rank's live tensors in a fit by purpose and memory. Of tensors that share memory the first one counts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.engines import _fsdp2


class Resident(NamedTuple):
    """A live tensor, or a number of bytes in C++ that no tensor in Python has."""

    kind: str  # One of `lightning_shard.memory.KINDS`.
    memory: str  # "device", "host" or "nvme".
    tensor: Tensor | int


def memory_of(tensor: Tensor, device: torch.device) -> str:
    """The memory of a tensor: "host" if it is on a CPU and the run computes on another ``device``."""
    return "host" if tensor.device.type == "cpu" and device.type != "cpu" else "device"


def is_sharded(parameter: Tensor) -> bool:
    """Whether FSDP2 or ZeRO's stage 3 has sharded a parameter."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor")


def module_tensors(
    module: nn.Module, optimizers: Iterable[Optimizer], *, device: torch.device, wrapper: nn.Module | None = None
) -> Iterator[Resident]:
    """The tensors of a module with full parameters or sharded by FSDP2. ``wrapper``: torch's DDP around it, if any."""
    on_host: dict[Tensor, bool] = dict(_fsdp2.sharded_parameters(module))

    def memory(parameter: Tensor, tensor: Tensor) -> str:
        return "host" if on_host.get(parameter) else memory_of(tensor, device)

    # First: gathered parameters are in the module in place of their shards.
    yield from unsharded(module)
    parameters = [*on_host, *module.parameters()]
    yield from (Resident("parameters", memory(p, p), p) for p in parameters)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            yield Resident("gradients", memory(parameter, parameter.grad), parameter.grad)
    waiting = _fsdp2.accumulated_gradients(module)
    yield from (Resident("gradients", memory_of(gradient, device), gradient) for _, gradient in waiting)
    yield from optimizer_tensors(optimizers, memory)
    yield from buffers(module, device=device)
    if isinstance(wrapper, DistributedDataParallel) and not wrapper.gradient_as_bucket_view:
        # The buckets are in C++. Each trainable parameter is in one of them from the start.
        yield Resident("communication", "device", sum(p.nbytes for p in module.parameters() if p.requires_grad))


def optimizer_tensors(optimizers: Iterable[Optimizer], memory: Callable[[Tensor, Tensor], str]) -> Iterator[Resident]:
    """The optimizers' state. ``memory(stepped, slot)`` returns the memory of a slot of a stepped tensor."""
    for optimizer in optimizers:
        for stepped, slots in optimizer.state.items():
            yield from (Resident("optimizer", memory(stepped, slot), slot) for slot in tensors_in(slots))


def buffers(module: nn.Module, *, device: torch.device) -> Iterator[Resident]:
    """Buffers and the states of torchmetrics."""
    yield from (Resident("buffers", memory_of(b, device), b) for b in module.buffers())
    for part in module.modules():
        if isinstance(part, Metric):
            yield from (Resident("buffers", memory_of(t, device), t) for t in tensors_in(part.metric_state))


def unsharded(module: nn.Module) -> Iterator[Resident]:
    """FSDP2's parameters that are gathered at this moment."""
    return (Resident("gathered", "device", tensor) for tensor in _fsdp2.gathered_tensors(module))


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
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
