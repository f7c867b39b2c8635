"""Bytes that one optimizer step sends, per collective and mesh axis, inside and between nodes; and how long that takes.

Formulas: with a ring over k ranks, an all-gather and a reduce-scatter of n bytes send ``(k - 1) / k * n`` from every
rank to the next one, an all-reduce twice that (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"; NCCL's ``nccl-tests/doc/PERFORMANCE.md``). No algorithm sends less. A ring through several
nodes leaves each node once, so that between nodes one group sends that much per node, not per device; groups that run
side by side (hybrid sharding has one for each device of a node) each send their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FACTORS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run."""

    nodes: int
    devices: int  # Per node, and so processes.

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.nodes * self.devices


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in an optimizer step."""

    kind: str  # One of `FACTORS`.
    what: str
    axis: str  # The mesh axis, or "all".
    ranks: int  # Of one group.
    stride: int  # Ranks from one member of a group to the next.
    payload: int  # Bytes of the full tensors that each rank has after or before the collectives, summed over a step.

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return FACTORS[self.kind] * (self.ranks - 1) / self.ranks * self.payload

    def inside(self, nodes: Nodes) -> float:
        """Bytes that a device sends to others of its node."""
        return self.sent if self._members(nodes) > 1 else 0.0

    def between(self, nodes: Nodes) -> float:
        """Bytes that a node sends to others."""
        members = self._members(nodes)
        return 0.0 if members >= self.ranks else self.sent * nodes.devices / members

    def _members(self, nodes: Nodes) -> int:
        """Ranks of a group on one node."""
        if self.stride >= nodes.devices:
            return 1
        return max(1, min(self.ranks, nodes.devices // self.stride))


def over_all_ranks(kind: str, what: str, ranks: int, payload: int) -> Collective:
    """Collectives in one group of all ranks."""
    return Collective(kind=kind, what=what, axis="all", ranks=ranks, stride=1, payload=payload)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of an optimizer step, in seconds, each as if it had the machine for itself."""

    compute: float
    inside: float  # Of the links inside nodes.
    between: float  # Of the links between nodes.

    @property
    def network(self) -> float:
        """Both kinds of links: a collective that uses both goes as fast as the slower one, and they share the step."""
        return max(self.inside, self.between)

    @property
    def expected(self) -> float:
        """With all communication hidden behind compute, as far as it fits there."""
        return max(self.compute, self.network)

    @property
    def bound(self) -> str:
        """What the step waits for."""
        if self.compute >= self.network:
            return "compute"
        return "the links between nodes" if self.between >= self.inside else "the links inside nodes"


def step_time(
    sent: Iterable[Collective], nodes: Nodes, *, flops: float, peak: float, inside: float | None, between: float | None
) -> StepTime:
    """The step's parts.

    Args:
        sent: from `lightning_shard.planning.predict.collectives`.
        nodes: where the ranks are.
        flops: of one device in an optimizer step.
        peak: operations per second that a device reaches.
        inside: bytes per second of a device to others of its node; None: free.
        between: bytes per second of a node to others; None: free.
    """
    sent = list(sent)
    return StepTime(
        compute=flops / peak,
        inside=sum(c.inside(nodes) for c in sent) / inside if inside else 0.0,
        between=sum(c.between(nodes) for c in sent) / between if between else 0.0,
    )
