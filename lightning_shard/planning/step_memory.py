"""Hold the memory of one rank at the points of a step: resident bytes, and bytes of a traced step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from lightning_shard.engines.owner_steps import BUCKET
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.memory_trace import Segment, Trace
from lightning_shard.planning.model_facts import ModelFacts, ParameterFacts, Training


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Resident bytes of the rank that needs most, without activations."""

    step: MemoryAccount  # During the optimizer's step.
    # Bytes of earlier micro-batches' gradients during the last one, without the sums that ZeRO stages 2 and 3 always
    # keep.
    waiting: int = 0
    left_in_step: int = 0  # Bytes of gradients in the compute dtype that the optimizer's step neither reads nor frees.


@dataclass(frozen=True, kw_only=True)
class ZeroMemory(StepMemory):
    """Resident bytes under ZeRO, which takes gradients one by one. Numbers are bytes on the device."""

    forward: MemoryAccount  # Without parameters that are gathered for one unit.
    backward: MemoryAccount  # The same, with all gradients that the engine keeps.
    copies_after_backward: int = 0  # Copies for the last reduction, allocated after backward.
    newest_gradient: int = 0  # The gradient that backward just made, which a trace counts as an activation.
    # Gradients in ``backward`` that are freed again, or not allocated yet, during the reduction after backward.
    freed_in_reduction: int = 0


def without_activations(training: Training) -> Trace:
    """A trace of a step that was not run: units in registration order, and the gradients that backward makes."""
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
    """``account`` with averages of the stepped tensors and of buffers. ``place`` is `Planner.averages`."""
    if place is None:
        return account
    places: dict[str, KindBytes] = vars(account)
    stepped = "masters" if any(kinds.masters for kinds in places.values()) else "parameters"
    averaged = {name: getattr(kinds, stepped) + kinds.buffers for name, kinds in places.items()}
    # Averages of masters on NVMe are on the host.
    device = 0 if place == "host" else averaged["device"]
    host = sum(averaged.values()) - device
    return account + MemoryAccount(device=KindBytes(averages=device), host=KindBytes(averages=host))


def on_device(resident: KindBytes, **kinds: int) -> MemoryAccount:
    """An account of ``resident`` on the device, with some kinds replaced."""
    return MemoryAccount(device=replace(resident, **kinds))


def compute_bytes(parameters: Iterable[ParameterFacts], compute: torch.dtype) -> int:
    """Bytes of full parameters in their compute dtypes."""
    return sum(p.numel * p.seen_in(compute).itemsize for p in parameters)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The memory of a rank at one point of a step."""

    name: str  # Such as "backward of model.layers.3".
    account: MemoryAccount
    # The device's bytes on streams of their own. The allocator reuses these on the same stream only.
    own_stream: KindBytes = field(default_factory=KindBytes)

    def held(self, *, cpu: bool = False) -> int:
        """Bytes of tensors on the device. ``cpu``: the device is a CPU, which also holds offloaded tensors."""
        return self.account.device.total + cpu * self.account.host.total


START = "start of the fit"


def peak(points: Sequence[Point], *, cpu: bool = False) -> Point:
    return max(points, key=lambda point: point.held(cpu=cpu))


def optimizer_point(memory: StepMemory, training: Training, trace: Trace, owners: int | None = None) -> Point:
    """The optimizer's step of masters, or of parameters on engines without them. ``owners``: the number of ranks that
    step full parameters if shards can't be stepped.
    """

    def temporary(kinds: KindBytes) -> KindBytes:
        stepped = 0 if not kinds.optimizer else kinds.masters or kinds.parameters * training.stepped_share
        stepped *= training.optimizer.share
        made, sent = training.optimizer.temporary * stepped, 3 * BUCKET * training.policy.master.itemsize
        # ZeRO's several optimizers step full parameters too.
        whole = training.optimizer.whole or (training.optimizer.share < 1 and isinstance(memory, ZeroMemory))
        if whole and owners is not None and stepped:
            # Full values and gradients that the rank owns, and at first also shards in and out of three buckets.
            made = 2 * stepped + max(made, 2 * min(stepped, sent / owners))
        return KindBytes(optimizer=int(made))

    account = memory.step
    left = KindBytes(activations=trace.segments[-1].end_activations, gradients=memory.left_in_step)
    added = MemoryAccount(device=temporary(account.device) + left, host=temporary(account.host))
    return Point(name="optimizer step", account=account + added)


def gradient_elements(model: ModelFacts, resident: Callable[[ParameterFacts], int]) -> dict[str, int]:
    """Elements of each unit's gradients on a rank. ``resident`` gives the elements of one parameter."""
    found = dict.fromkeys(model.units, 0)
    for p in model.stepped_parameters:
        found[p.unit] += resident(p)
    return found
