"""The memory of one rank at the three points of a step where it may peak, without activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from lightning_shard.memory import KINDS, KindBytes, MemoryAccount
from lightning_shard.planning.facts import ParameterFacts

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
        at_points = [getattr(self, point) for point in POINTS]
        devices = {
            device.name: KindBytes(
                **{kind: max(getattr(getattr(account, device.name), kind) for account in at_points) for kind in KINDS}
            )
            for device in fields(MemoryAccount)
        }
        return MemoryAccount(**devices)


def on_device(resident: KindBytes, **kinds: int) -> MemoryAccount:
    """``resident`` on the device, with other bytes of some kinds."""
    return MemoryAccount(device=replace(resident, **kinds))


def compute_bytes(parameters: Iterable[ParameterFacts], compute: torch.dtype) -> int:
    """Bytes of full parameters in the dtype in which forward sees them."""
    return sum(p.numel * p.seen_in(compute).itemsize for p in parameters)
