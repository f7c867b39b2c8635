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

import torch

from lightning_shard.engines.facts import DeepSpeedFacts, EngineFacts, FSDPFacts, ReplicateFacts, TorchDDPFacts
from lightning_shard.planning.facts import ModelFacts, ParameterFacts
from lightning_shard.planning.fully_shard import gathered_bytes, reduced_bytes
from lightning_shard.planning.zero_stage_3 import persistent_parameters
from lightning_shard.precision.policy import PrecisionPolicy

FACTORS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run."""

    nodes: int
    devices: int
    """Per node, and so processes."""

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.nodes * self.devices


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in an optimizer step."""

    kind: str
    """One of `FACTORS`."""

    what: str
    axis: str
    """The mesh axis, or "all"."""

    ranks: int
    """Of one group."""

    stride: int
    """Ranks from one member of a group to the next."""

    payload: int
    """Bytes that the collectives of one group leave whole on, or take whole from, each rank, summed over a step."""

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


def collectives(
    model: ModelFacts, engine: EngineFacts, policy: PrecisionPolicy, *, micro_batches: int = 1
) -> list[Collective]:
    """What one optimizer step sends; norms, losses and buffers are left out, which are small."""
    if isinstance(engine, TorchDDPFacts | ReplicateFacts):
        times = 1 if engine.reduce_at_boundary else micro_batches
        gradients = _bytes(model.trainable, policy.reduce) * times
        found = [_over_all("all-reduce", "gradients", engine.ranks, gradients)]
    elif isinstance(engine, FSDPFacts):
        found = _fsdp(model, engine, policy, micro_batches)
    else:
        found = _zero(model, engine, policy, micro_batches)
    return [c for c in found if c.ranks > 1 and c.payload]


def _bytes(parameters: Iterable[ParameterFacts], dtype: torch.dtype) -> int:
    return sum(p.numel * dtype.itemsize for p in parameters)


def _over_all(kind: str, what: str, ranks: int, payload: int) -> Collective:
    return Collective(kind=kind, what=what, axis="all", ranks=ranks, stride=1, payload=payload)


def _fsdp(model: ModelFacts, engine: FSDPFacts, policy: PrecisionPolicy, micro_batches: int) -> list[Collective]:
    size = engine.shard
    units = {name: gathered_bytes(members, size, policy.compute) for name, members in model.units.items()}
    below = sum(units.values()) - units[""]
    reduced = sum(reduced_bytes(members, size, policy.reduce) for members in model.units.values())
    times = 1 if engine.reduce_at_boundary else micro_batches

    def over_shard(kind: str, what: str, payload: int, ranks: int = size) -> Collective:
        return Collective(kind=kind, what=what, axis="shard", ranks=ranks, stride=1, payload=payload)

    found = [over_shard("all-gather", "parameters, forward", sum(units.values()) * micro_batches)]
    again = engine.reshard_after_forward
    if again is not False:
        # The root stays gathered from forward to backward.
        ranks = size if again is True else int(again)
        found.append(over_shard("all-gather", "parameters, backward", below * micro_batches, ranks))
    found.append(over_shard("reduce-scatter", "gradients", reduced * times))
    if engine.replicate > 1:
        payload = reduced // size * times
        found.append(
            Collective(
                kind="all-reduce",
                what="gradient shards",
                axis="replicate",
                ranks=engine.replicate,
                stride=size,
                payload=payload,
            )
        )
    return found


def _zero(model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, micro_batches: int) -> list[Collective]:
    ranks, trainable = engine.ranks, model.trainable
    times = micro_batches if engine.stage >= 2 else 1
    gradients = _bytes(trainable, policy.reduce) * times
    if engine.stage == 0:
        return [_over_all("all-reduce", "gradients", ranks, gradients)]
    if engine.stage < 3:
        # Buckets are all-reduced, and each rank keeps its part (``use_multi_rank_bucket_allreduce``, the default).
        return [
            _over_all("all-reduce", "gradients", ranks, gradients),
            _over_all("all-gather", "updated parameters", ranks, _bytes(trainable, policy.compute)),
        ]
    small = persistent_parameters(model.parameters, engine)
    persistent = {p.fqn for p in small}
    gathered = sum(p.numel * p.seen_in(policy.compute).itemsize for p in model.parameters if p.fqn not in persistent)
    again = Collective(
        kind="all-gather",
        what="parameters, backward",
        axis="all" if engine.zero_hpz_partition_size <= 1 else "hpZ",
        ranks=ranks if engine.zero_hpz_partition_size <= 1 else engine.zero_hpz_partition_size,
        stride=1,
        payload=gathered * micro_batches,
    )
    return [
        _over_all("all-gather", "parameters, forward", ranks, gathered * micro_batches),
        again,
        _over_all("reduce-scatter", "gradients", ranks, gradients),
        _over_all("all-gather", "persistent parameters", ranks, sum(p.numel * policy.compute.itemsize for p in small)),
    ]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of an optimizer step, in seconds, each as if it had the machine for itself."""

    compute: float
    inside: float
    """Of the links inside nodes."""

    between: float
    """Of the links between nodes."""

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
        sent: from `collectives`.
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
