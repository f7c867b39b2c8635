"""Bytes of a rank under DeepSpeed's ZeRO at the points of a step, without activations.

Sources: DeepSpeed 0.19.8, in the modules of the stages.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_shard.engines.facts import DeepSpeedFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.step_memory import Moments, optimizer_bytes, seen_bytes
from lightning_shard.planning.zero_stage_3 import stage_3
from lightning_shard.planning.zero_stages_1_2 import stages_1_2
from lightning_shard.precision.policy import PrecisionPolicy

ALLREDUCE_BUCKET = 500_000_000
"""Elements of gradients that stage 0 puts together at a time (``runtime/engine.py``, MEMORY_OPT_ALLREDUCE_SIZE)."""


def zero_moments(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, *, micro_batches: int
) -> Moments:
    """The moments of the rank that holds most."""
    if engine.stage == 0:
        return _stage_0(model, engine, policy, optimizer, micro_batches)
    moments = (stage_3 if engine.stage == 3 else stages_1_2)(model, engine, policy, optimizer, micro_batches)
    frozen = _kept_frozen(model, engine, policy)
    return replace(
        moments, forward=moments.forward + frozen, backward=moments.backward + frozen, step=moments.step + frozen
    )


def _kept_frozen(model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy) -> MemoryAccount:
    """This rank's share of frozen parameters that the cast rounded: it is kept on the host for checkpoints."""
    total = 0
    for p in model.parameters:
        rounded = p.dtype.is_floating_point and torch.promote_types(p.dtype, policy.compute) != policy.compute
        if rounded and not p.trainable:
            total += -(-p.numel // engine.ranks) * p.dtype.itemsize
    return MemoryAccount(host=KindBytes(masters=total))


def _stage_0(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> Moments:
    """Everything whole; gradients are flattened into buckets at the boundary."""
    numel = sum(p.numel for p in model.trainable)
    gradients = numel * policy.compute.itemsize
    resting = KindBytes(
        parameters=seen_bytes(model.parameters, policy.compute),
        optimizer=optimizer_bytes(((p.numel, policy.master) for p in model.trainable), optimizer),
        buffers=model.buffer_bytes,
    )
    bucket = min(numel, ALLREDUCE_BUCKET) * policy.reduce.itemsize
    return Moments(
        forward=MemoryAccount(device=replace(resting, gradients=gradients if micro_batches > 1 else 0)),
        backward=MemoryAccount(device=replace(resting, gradients=gradients, communication=bucket)),
        step=MemoryAccount(device=replace(resting, gradients=gradients)),
        at_end=bucket,
        waiting=gradients if micro_batches > 1 else 0,
    )
