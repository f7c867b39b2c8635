"""The memory of one rank at the three points of a step where it may peak, without activations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from lightning_shard.memory import KindBytes, MemoryAccount, most
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts
from lightning_shard.planning.memory_trace import Segment, Trace

POINTS = ("forward", "backward", "step")


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What the rank that needs most has resident, without activations. Bytes below are of its device."""

    forward: MemoryAccount  # While the unit computes that needs most.
    # While the unit is reduced that needs most, with all gradients there that the engine keeps.
    backward: MemoryAccount
    step: MemoryAccount  # While the optimizer steps.
    # Bytes of ``backward``'s communication that are allocated after backward only: copies for the last reduction.
    copies_after_backward: int = 0
    # Bytes of ``backward``'s gradients that are of the one that backward just made, which a trace counts among its
    # activations.
    newest_gradient: int = 0
    # Bytes of ``backward``'s gradients that are freed again, or not yet allocated, while those are reduced that wait
    # until backward is over.
    freed_in_reduction: int = 0
    # Bytes of gradients in the compute dtype that stay resident beside those that the optimizer reads.
    left_in_step: int = 0
    # Bytes of earlier micro-batches' gradients, which the last one's are added to or wait beside; the sums that ZeRO
    # stages 2 and 3 keep in any case are not among them.
    waiting: int = 0

    @property
    def largest(self) -> MemoryAccount:
        """Each kind at the point where there is most of it."""
        return most(*(getattr(self, point) for point in POINTS))


def with_averages(account: MemoryAccount, place: str | None) -> MemoryAccount:
    """``account`` with averages of what is stepped and of buffers; ``place`` as for `Planner`."""
    if place is None:
        return account
    places = {"device": account.device, "host": account.host, "nvme": account.nvme}
    stepped = "masters" if any(kinds.masters for kinds in places.values()) else "parameters"
    averaged = {name: getattr(kinds, stepped) + kinds.buffers for name, kinds in places.items()}
    beside = {"device": averaged["device"], "host": averaged["host"] + averaged["nvme"]}
    found = {"host": sum(averaged.values())} if place == "host" else beside
    return account + MemoryAccount(**{name: KindBytes(averages=size) for name, size in found.items()})


def on_device(resident: KindBytes, **kinds: int) -> MemoryAccount:
    """``resident`` on the device, with other bytes of some kinds."""
    return MemoryAccount(device=replace(resident, **kinds))


def compute_bytes(parameters: Iterable[ParameterFacts], compute: torch.dtype) -> int:
    """Bytes of full parameters in the dtype in which forward sees them."""
    return sum(p.numel * p.seen_in(compute).itemsize for p in parameters)


@dataclass(frozen=True, kw_only=True)
class Point:
    name: str  # Such as "backward of model.layers.3".
    account: MemoryAccount
    # Of the device's bytes, those that are allocated on a stream of their own: the allocator lets no other use them.
    apart: KindBytes = field(default_factory=KindBytes)


START = "start of the fit"


def peak(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: point.account.device.total)


def optimizer_point(memory: StepMemory, optimizer: OptimizerFacts, trace: Trace) -> Point:
    """The optimizer's step: it steps the masters, or the parameters where there are no masters."""

    def temporary(kinds: KindBytes) -> KindBytes:
        stepped = 0 if not kinds.optimizer else kinds.masters or kinds.parameters
        return KindBytes(optimizer=int(optimizer.temporary * stepped))

    account = memory.step
    left = KindBytes(activations=trace.segments[-1].end_activations, gradients=memory.left_in_step)
    added = MemoryAccount(device=temporary(account.device) + left, host=temporary(account.host))
    return Point(name="optimizer step", account=account + added)


def gradient_elements(model: ModelFacts, resident: Callable[[ParameterFacts], int]) -> dict[str, int]:
    """Elements of a rank's gradients of each unit; ``resident``: of one parameter."""
    found = dict.fromkeys(model.units, 0)
    for p in model.trainable:
        found[p.unit] += resident(p)
    return found


def with_segment(
    base: MemoryAccount, segment: Segment, *, gradients: int, gathered: int = 0, communication: int = 0
) -> MemoryAccount:
    """``base`` with a segment's activations at its peak, all ``gradients``, gathered parameters and buffers."""
    activations = segment.peak - segment.peak_gradients
    kinds = KindBytes(gradients=gradients, gathered=gathered, communication=communication, activations=activations)
    return base + MemoryAccount(device=kinds)
