"""The memory of one rank at the points of a step: what is resident, and what a traced step adds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from lightning_shard.engines.whole_steps import BUCKET
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.memory_trace import Segment, Trace
from lightning_shard.planning.model_facts import ModelFacts, ParameterFacts, Training


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What the rank that needs most has resident, without activations."""

    step: MemoryAccount  # While the optimizer steps.
    # Bytes of earlier micro-batches' gradients, which the last one's are added to or wait beside; the sums that ZeRO
    # stages 2 and 3 keep in any case are not among them.
    waiting: int = 0
    # Bytes of gradients in the compute dtype that stay resident beside those that the optimizer reads.
    left_in_step: int = 0


@dataclass(frozen=True, kw_only=True)
class ZeroMemory(StepMemory):
    """The same under ZeRO, which takes gradients one by one. Bytes below are of its device."""

    forward: MemoryAccount  # But for what is gathered for one unit.
    backward: MemoryAccount  # Likewise, with all gradients there that the engine keeps.
    # Bytes of communication that are allocated after backward only: copies for the last reduction.
    copies_after_backward: int = 0
    # Bytes of the gradient that backward just made, which a trace counts among its activations.
    newest_gradient: int = 0
    # Bytes of ``backward``'s gradients that are freed again, or not yet allocated, while those are reduced that wait
    # until backward is over.
    freed_in_reduction: int = 0


def without_activations(training: Training) -> Trace:
    """Of a step what is known without one: units in their order, and the gradients that backward makes of each."""
    names, complete = list(training.model.units), list[str]()
    segments = [Segment(phase="forward", unit=name) for name in names]
    for name in [*reversed(names[1:]), ""]:
        stepped = [p for p in training.model.units[name] if p in training.model.trainable and not p.unsharded]
        made = compute_bytes(stepped, training.policy.compute)
        complete.append(name)
        backward = Segment(phase="backward", unit=name, complete=tuple(complete), has_gradients=True)
        segments.append(replace(backward, peak=made, peak_gradients=made, at_reduction=made))
    return Trace(segments=tuple(segments), batch_size=1)


def with_averages(account: MemoryAccount, place: str | None) -> MemoryAccount:
    """``account`` with averages of what is stepped and of buffers; ``place`` as for `Planner`."""
    if place is None:
        return account
    places: dict[str, KindBytes] = vars(account)
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

    def held(self, *, cpu: bool = False) -> int:
        """Bytes of tensors on the device; ``cpu``: whose memory is the host's, where offloaded ones are too."""
        return self.account.device.total + cpu * self.account.host.total


START = "start of the fit"


def peak(points: Sequence[Point], *, cpu: bool = False) -> Point:
    return max(points, key=lambda point: point.held(cpu=cpu))


def optimizer_point(memory: StepMemory, training: Training, trace: Trace, owners: int | None = None) -> Point:
    """The optimizer's step of the masters, or of parameters without. ``owners``: ranks that own full ones, if any."""

    def temporary(kinds: KindBytes) -> KindBytes:
        stepped = 0 if not kinds.optimizer else kinds.masters or kinds.parameters * training.stepped_share
        stepped *= training.optimizer.share
        made, sent = training.optimizer.temporary * stepped, 3 * BUCKET * training.policy.master.itemsize
        # ZeRO's several optimizers step full parameters too.
        whole = training.optimizer.whole or (training.optimizer.share < 1 and isinstance(memory, ZeroMemory))
        if whole and owners is not None and stepped:
            # Full values and gradients of what a rank owns, and beside the first, shards to and from three buckets.
            made = 2 * stepped + max(made, 2 * min(stepped, sent / owners))
        return KindBytes(optimizer=int(made))

    account = memory.step
    left = KindBytes(activations=trace.segments[-1].end_activations, gradients=memory.left_in_step)
    added = MemoryAccount(device=temporary(account.device) + left, host=temporary(account.host))
    return Point(name="optimizer step", account=account + added)


def gradient_elements(model: ModelFacts, resident: Callable[[ParameterFacts], int]) -> dict[str, int]:
    """Elements of a rank's gradients of each unit; ``resident``: of one parameter."""
    found = dict.fromkeys(model.units, 0)
    for p in model.stepped:
        found[p.unit] += resident(p)
    return found
