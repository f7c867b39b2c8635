"""Bytes of a rank under DeepSpeed's ZeRO, and what it sends; stages 1 to 3 have modules of their own.

Sources: DeepSpeed 0.19.8, in the modules of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_shard.engines.facts import DeepSpeedFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.step_memory import StepMemory, compute_bytes, on_device
from lightning_shard.planning.step_points import Point, gradient_elements, segment_name
from lightning_shard.planning.traffic import Collective, over_all_ranks
from lightning_shard.planning.zero_stage_3 import gathered_elements, persistent_parameters, stage_3
from lightning_shard.planning.zero_stages_1_2 import stages_1_2
from lightning_shard.precision.policy import PrecisionPolicy

ALLREDUCE_BUCKET = 500_000_000
"""Elements of gradients that stage 0 reduces at a time (``runtime/engine.py``, MEMORY_OPT_ALLREDUCE_SIZE)."""


def step_memory(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> StepMemory:
    """See `lightning_shard.planning.predict.predict`."""
    stage = (_stage_0, stages_1_2, stages_1_2, stage_3)[engine.stage]
    memory = stage(model, engine, policy, optimizer, micro_batches)
    if engine.stage == 0:
        return memory
    frozen = _frozen_copies(model, engine, policy)
    return replace(
        memory, forward=memory.forward + frozen, backward=memory.backward + frozen, step=memory.step + frozen
    )


def _frozen_copies(model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy) -> MemoryAccount:
    """This rank's slices of frozen parameters that casting rounded, which stay on the host for checkpoints."""
    total = 0
    for p in model.parameters:
        rounded = p.dtype.is_floating_point and torch.promote_types(p.dtype, policy.compute) != policy.compute
        if rounded and not p.trainable:
            total += -(-p.numel // engine.ranks) * p.dtype.itemsize
    return MemoryAccount(host=KindBytes(masters=total))


def _stage_0(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> StepMemory:
    """Nothing is sharded; gradients are flattened into buckets at the accumulation boundary."""
    sizes = [p.numel for p in model.trainable]
    gradients = sum(sizes) * policy.compute.itemsize
    resident = KindBytes(
        parameters=compute_bytes(model.parameters, policy.compute),
        optimizer=optimizer.state_bytes(sizes, policy.master),
        buffers=model.buffer_bytes,
    )
    bucket = min(sum(sizes), ALLREDUCE_BUCKET) * policy.reduce.itemsize
    waiting = gradients if micro_batches > 1 else 0
    return StepMemory(
        forward=on_device(resident, gradients=waiting),
        backward=on_device(resident, gradients=gradients, communication=bucket),
        step=on_device(resident, gradients=gradients),
        copies_after_backward=bucket,
        waiting=waiting,
    )


def step_points(
    model: ModelFacts,
    engine: DeepSpeedFacts,
    policy: PrecisionPolicy,
    memory: StepMemory,
    trace: Trace,
    micro_batches: int,
) -> Iterator[Point]:
    """See `lightning_shard.planning.predict.step_points`.

    DeepSpeed takes gradients one by one, so that only those that it keeps are resident beside the activations.
    """
    elements = gradient_elements(model, lambda p: p.numel)
    total = max(1, sum(elements.values()))
    gathered = gathered_elements(model, engine, trace.order) if engine.stage == 3 else {}
    forward, backward = memory.forward, memory.backward
    always_gathered = memory.step.device.gathered
    done: tuple[str, ...] = ()
    for segment in trace.segments:
        # Buckets are allocated with the first gradient.
        base = backward if segment.has_gradients else forward
        device = replace(base.device, activations=segment.activations)
        if segment.has_gradients:
            reached = sum(elements[name] for name in {*done, *([] if engine.stage <= 1 else [segment.unit])})
            device = replace(device, **_in_backward(engine, memory, reached, total))
        if engine.stage <= 1 and not memory.waiting:
            # Gradients stay as backward made them, also in a unit of which some are missing.
            gradients = device.gradients + segment.peak_gradients
            device = replace(device, activations=segment.peak - segment.peak_gradients, gradients=gradients)
        if engine.stage == 3:
            here = gathered.get((segment.phase, segment.unit), 0)
            device = replace(device, gathered=always_gathered + here * policy.compute.itemsize)
        yield Point(name=segment_name(segment), account=replace(base, device=device))
        done = segment.complete or done
    end = replace(
        backward.device,
        gathered=always_gathered,
        gradients=backward.device.gradients - memory.newest_gradient - memory.freed_in_reduction,
        activations=trace.segments[-1].end_activations,
    )
    yield Point(name="end of backward", account=replace(backward, device=end))


def _in_backward(engine: DeepSpeedFacts, memory: StepMemory, reached: int, total: int) -> dict[str, int]:
    """Gradients and communication of the device when backward has made those of ``reached`` of ``total`` elements."""
    device = memory.backward.device
    before, after = memory.forward.device.gradients, device.gradients - memory.newest_gradient
    communication = device.communication - memory.copies_after_backward
    if engine.stage <= 1:
        return {"gradients": before + int((after - before) * reached / total), "communication": communication}
    # Stage 2 allocates its partition when the first bucket is full, stage 3 for the whole run.
    return {"gradients": after if reached > engine.reduce_bucket_size else before, "communication": communication}


def collectives(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, micro_batches: int
) -> list[Collective]:
    """See `lightning_shard.planning.predict.collectives`."""
    ranks, compute = engine.ranks, policy.compute
    numel = sum(p.numel for p in model.trainable)
    gradients = numel * policy.reduce.itemsize * (micro_batches if engine.stage >= 2 else 1)
    if engine.stage < 3:
        # Buckets are all-reduced, and each rank keeps its part (``use_multi_rank_bucket_allreduce``, the default).
        found = [over_all_ranks("all-reduce", "gradients", ranks, gradients)]
        if engine.stage > 0:
            found.append(over_all_ranks("all-gather", "updated parameters", ranks, numel * compute.itemsize))
        return found
    persistent = persistent_parameters(model.parameters, engine)
    names = {p.fqn for p in persistent}
    gathered = compute_bytes((p for p in model.parameters if p.fqn not in names), compute) * micro_batches
    again = over_all_ranks("all-gather", "parameters, backward", ranks, gathered)
    if engine.zero_hpz_partition_size > 1:
        again = replace(again, axis="hpZ", ranks=engine.zero_hpz_partition_size)
    updated = sum(p.numel for p in persistent) * compute.itemsize
    return [
        over_all_ranks("all-gather", "parameters, forward", ranks, gathered),
        again,
        over_all_ranks("reduce-scatter", "gradients", ranks, gradients),
        over_all_ranks("all-gather", "persistent parameters", ranks, updated),
    ]
