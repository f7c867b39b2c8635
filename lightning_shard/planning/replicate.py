"""Bytes of a rank under torch's FSDP2-based ``replicate``, and what it sends.

It is FSDP2 with one shard, which stays gathered from forward to backward: a copy in the compute dtype, even where that
is the parameters' own (``FSDPParamGroup.wait_for_unshard``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_shard.engines.facts import FSDPFacts, ReplicateFacts
from lightning_shard.planning import fully_shard
from lightning_shard.planning.facts import ModelFacts
from lightning_shard.planning.step_memory import StepMemory
from lightning_shard.planning.step_points import Point
from lightning_shard.planning.torch_ddp import collectives

__all__ = ["collectives", "step_memory", "step_points"]


def step_memory(model: ModelFacts, engine: ReplicateFacts, *others: Any) -> StepMemory:
    """See `lightning_shard.planning.predict.predict`."""
    return fully_shard.step_memory(model, _with_one_shard(engine), *others)


def step_points(model: ModelFacts, engine: ReplicateFacts, *others: Any) -> Iterator[Point]:
    """See `lightning_shard.planning.predict.step_points`."""
    return fully_shard.step_points(model, _with_one_shard(engine), *others)


def _with_one_shard(engine: ReplicateFacts) -> FSDPFacts:
    return FSDPFacts(
        replicate=engine.ranks, shard=1, reshard_after_forward=False, reduce_at_boundary=engine.reduce_at_boundary
    )
