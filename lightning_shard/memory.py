"""Bytes per rank by memory and kind: the words in which a run's memory is measured and in which a plan is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

#: What each kind means, in the order of the tables.
KINDS: dict[str, str] = {
    "parameters": "the module's parameters that are resident on this rank between steps",
    "masters": "master weights that an engine has beside the module's parameters",
    "gathered": "parameters that are full only while their unit computes",
    "gradients": "gradients at the optimizer step, in their own dtype and sharding",
    "optimizer": "the optimizer's state",
    "buffers": "the module's buffers and its metrics' states",
    "averages": "averages of weights and buffers that a callback takes",
    "activations": "what forward saves for backward, and what backward makes on its way",
    "communication": "buckets and staging buffers of collectives and of offload",
}


@dataclass(frozen=True, kw_only=True)
class KindBytes:
    """Bytes of each kind in one memory, on one rank."""

    parameters: int = 0
    masters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    averages: int = 0
    activations: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(vars(self).values())

    def __add__(self, other: KindBytes) -> KindBytes:
        return KindBytes(**{kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS})


PLACES = ("device", "host", "nvme")


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """Where one rank's bytes are resident: on its device, offloaded to the host or to NVMe. A CPU is a device too."""

    device: KindBytes = field(default_factory=KindBytes)
    host: KindBytes = field(default_factory=KindBytes)
    nvme: KindBytes = field(default_factory=KindBytes)

    def __add__(self, other: MemoryAccount) -> MemoryAccount:
        return _kind_by_kind(sum, (self, other))


def most(*accounts: MemoryAccount) -> MemoryAccount:
    """The greatest of each kind and place, which accounts may have had at different times."""
    return _kind_by_kind(max, accounts)


def _kind_by_kind(of: Callable[[Iterable[int]], int], accounts: Iterable[MemoryAccount]) -> MemoryAccount:
    found = {}
    for place in PLACES:
        held = [vars(getattr(account, place)) for account in accounts]
        found[place] = KindBytes(**{kind: of(each[kind] for each in held) for kind in KINDS})
    return MemoryAccount(**found)
