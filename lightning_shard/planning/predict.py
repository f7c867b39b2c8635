"""Bytes of one rank by arithmetic: parameters, masters, gradients, optimizer state, buffers, gathered, communication.

Only the fullest rank is looked at, and nothing grows with the number of ranks: 16,384 of them cost what 8 do.
Activations are not in these numbers. What each engine cuts is that of ZeRO (arXiv 1910.02054, section 3.1); what it
keeps besides is read off torch's and DeepSpeed's sources, which the modules of the engines name.
"""

from __future__ import annotations

from lightning_shard.engines.facts import EngineFacts, FSDPFacts, ReplicateFacts, TorchDDPFacts
from lightning_shard.memory import MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.fully_shard import replica_moments, shard_moments
from lightning_shard.planning.step_memory import Moments
from lightning_shard.planning.zero import zero_moments
from lightning_shard.precision.policy import PrecisionPolicy


def predict(
    model: ModelFacts,
    engine: EngineFacts,
    policy: PrecisionPolicy,
    optimizer: OptimizerFacts | None = None,
    *,
    micro_batches: int = 1,
) -> Moments:
    """The bytes of the rank that holds most, at the points of a step.

    Args:
        model: its parameters and shard units, from `lightning_shard.planning.facts.model_facts`.
        engine: with its settings and the number of ranks.
        policy: the dtypes of the run.
        optimizer: its state; default: Adam's, two moments in the stepped dtype.
        micro_batches: how many are summed for a step.
    """
    optimizer = optimizer or OptimizerFacts()
    if isinstance(engine, TorchDDPFacts | ReplicateFacts):
        return replica_moments(model, engine, policy, optimizer, micro_batches=micro_batches)
    if isinstance(engine, FSDPFacts):
        return shard_moments(model, engine, policy, optimizer, micro_batches=micro_batches)
    return zero_moments(model, engine, policy, optimizer, micro_batches=micro_batches)


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
