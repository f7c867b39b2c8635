"""What each engine needs and sends, by its facts: memory of one rank, at each part of a traced step, and traffic.

Only the rank that needs most is looked at, and no cost grows with the number of ranks: 16,384 of them take as long as
8. What ZeRO shards is as in its paper (arXiv 1910.02054, section 3.1); what each engine keeps besides is read off
torch's and DeepSpeed's sources, which its module names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.facts import DeepSpeedFacts, EngineFacts, FSDPFacts, ReplicateFacts, TorchDDPFacts
from lightning_shard.memory import MemoryAccount
from lightning_shard.planning import fully_shard, replicate, torch_ddp, zero
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.step_memory import StepMemory
from lightning_shard.planning.step_points import Point, optimizer_point
from lightning_shard.planning.traffic import Collective
from lightning_shard.precision.policy import PrecisionPolicy

_ARITHMETIC: Mapping[type[EngineFacts], Any] = {
    TorchDDPFacts: torch_ddp,
    ReplicateFacts: replicate,
    FSDPFacts: fully_shard,
    DeepSpeedFacts: zero,
}
"""An engine's facts to the module that has its ``step_memory``, ``step_points`` and ``collectives``."""


def predict(
    model: ModelFacts,
    engine: EngineFacts,
    policy: PrecisionPolicy,
    optimizer: OptimizerFacts | None = None,
    *,
    micro_batches: int = 1,
) -> StepMemory:
    """The memory of the rank that needs most, at three points of a step and without activations.

    Args:
        model: its parameters and shard units, from `lightning_shard.planning.facts.model_facts`.
        engine: with its settings and the number of ranks.
        policy: the dtypes of the run.
        optimizer: its state; default: Adam's, two moments in the masters' dtype.
        micro_batches: how many are summed for a step.
    """
    optimizer = optimizer or OptimizerFacts()
    return _ARITHMETIC[type(engine)].step_memory(model, engine, policy, optimizer, micro_batches)


def predict_account(
    model: ModelFacts,
    engine: EngineFacts,
    policy: PrecisionPolicy,
    optimizer: OptimizerFacts | None = None,
    *,
    micro_batches: int = 1,
) -> MemoryAccount:
    """`predict` in one account: each kind at the point of the step where there is most of it."""
    return predict(model, engine, policy, optimizer, micro_batches=micro_batches).largest


def step_points(
    model: ModelFacts,
    engine: EngineFacts,
    policy: PrecisionPolicy,
    optimizer: OptimizerFacts,
    trace: Trace,
    *,
    micro_batches: int = 1,
) -> list[Point]:
    """The memory of the same rank at every part of the micro-batch that needs most, and in the optimizer's step.

    The engine's bytes are arithmetic; activations are the trace's.
    """
    memory = predict(model, engine, policy, optimizer, micro_batches=micro_batches)
    arithmetic = _ARITHMETIC[type(engine)]
    points = arithmetic.step_points(model, engine, policy, memory, trace, micro_batches)
    return [*points, optimizer_point(memory, optimizer, trace)]


def collectives(
    model: ModelFacts, engine: EngineFacts, policy: PrecisionPolicy, *, micro_batches: int = 1
) -> list[Collective]:
    """What one optimizer step sends, without norms, losses and buffers, which are small."""
    found = _ARITHMETIC[type(engine)].collectives(model, engine, policy, micro_batches)
    return [c for c in found if c.ranks > 1 and c.payload]
