"""Bytes per rank by memory and kind: the words in which a run's memory is measured and in which a plan is written."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

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
        return sum(getattr(self, kind.name) for kind in fields(self))

    def __add__(self, other: KindBytes) -> KindBytes:
        return KindBytes(**{kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS})


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """Where one rank's bytes are resident: on its device, offloaded to the host's memory, offloaded to NVMe.

    On a CPU the device is the host's memory too: what is not offloaded counts as the device's there as everywhere.
    """

    device: KindBytes = field(default_factory=KindBytes)
    host: KindBytes = field(default_factory=KindBytes)
    nvme: KindBytes = field(default_factory=KindBytes)

    def __add__(self, other: MemoryAccount) -> MemoryAccount:
        return MemoryAccount(
            device=self.device + other.device, host=self.host + other.host, nvme=self.nvme + other.nvme
        )


def most(*accounts: MemoryAccount) -> MemoryAccount:
    """The greatest of each kind and place, which accounts may have had at different times."""
    places = (place.name for place in fields(MemoryAccount))
    return MemoryAccount(
        **{
            place: KindBytes(**{kind: max(getattr(getattr(a, place), kind) for a in accounts) for kind in KINDS})
            for place in places
        }
    )
