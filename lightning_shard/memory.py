"""Bytes per rank by memory and kind, as measured in a run and as predicted by a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, kw_only=True)
class KindBytes:
    """Bytes of each kind in one memory, on one rank. Tables list the kinds in this order."""

    parameters: int = 0  # The module's own parameters, between steps.
    masters: int = 0  # Master weights that are separate from the module's parameters.
    gathered: int = 0  # Parameters that are full only while their unit computes.
    gradients: int = 0  # Gradients at the optimizer step, in their own dtype and sharding.
    optimizer: int = 0  # The optimizer's state.
    buffers: int = 0  # The module's buffers and its metrics' states.
    averages: int = 0  # Averages of weights and buffers that a callback takes.
    activations: int = 0  # Tensors saved for backward, and temporaries of backward.
    communication: int = 0  # Buckets and staging buffers of collectives and of offload.

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(vars(self).values())

    def __add__(self, other: KindBytes) -> KindBytes:
        return KindBytes(**{kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS})


KINDS = tuple(kind.name for kind in fields(KindBytes))
PLACES = ("device", "host", "nvme")


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """One rank's bytes by place: its device, host memory (offload) and NVMe. A CPU is a device too."""

    device: KindBytes = field(default_factory=KindBytes)
    host: KindBytes = field(default_factory=KindBytes)
    nvme: KindBytes = field(default_factory=KindBytes)

    def __add__(self, other: MemoryAccount) -> MemoryAccount:
        return MemoryAccount(**{place: getattr(self, place) + getattr(other, place) for place in PLACES})


def most(*accounts: MemoryAccount) -> MemoryAccount:
    """The maximum of each kind and place over several moments."""
    found = {}
    for place in PLACES:
        held = [vars(getattr(account, place)) for account in accounts]
        found[place] = KindBytes(**{kind: max(each[kind] for each in held) for kind in KINDS})
    return MemoryAccount(**found)
