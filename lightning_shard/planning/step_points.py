"""The memory of one rank at each part of a traced step: what the engines' arithmetic shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts
from lightning_shard.planning.live_bytes import Segment
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.step_memory import StepMemory


@dataclass(frozen=True, kw_only=True)
class Point:
    """A moment of a step."""

    name: str  # Such as "backward of model.layers.3".
    account: MemoryAccount


def peak(points: Sequence[Point]) -> Point:
    """The point where the device has most resident."""
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


def segment_name(segment: Segment) -> str:
    """The name of the point at which a segment's peak is."""
    return f"{segment.phase} of {segment.unit}" if segment.unit else f"{segment.phase} outside of units"


def gradient_elements(model: ModelFacts, resident: Callable[[ParameterFacts], int]) -> dict[str, int]:
    """Elements of a rank's gradients of each unit; ``resident``: of one parameter."""
    found = dict.fromkeys(model.units, 0)
    for p in model.trainable:
        found[p.unit] += resident(p)
    return found


def with_segment(
    base: MemoryAccount, segment: Segment, *, gradients: int, gathered: int = 0, communication: int = 0
) -> MemoryAccount:
    """``base`` with what is on the device besides at a segment's peak.

    Args:
        base: what is resident at all times.
        segment: its activations are added; its gradients are among ``gradients``.
        gradients: bytes of all gradients at that time.
        gathered: bytes of unsharded parameters.
        communication: bytes of the collectives' buffers.
    """
    activations = segment.peak - segment.peak_gradients
    kinds = KindBytes(gradients=gradients, gathered=gathered, communication=communication, activations=activations)
    return base + MemoryAccount(device=kinds)
