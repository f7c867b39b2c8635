"""What each engine needs and sends, by its facts: memory of the rank that needs most, at each part of a traced step,
and traffic, at a cost that does not grow with the ranks. What ZeRO shards is as in its paper (arXiv 1910.02054, section
3.1); what each engine keeps besides is read off the sources that its module names.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_shard.engines.memory_model import DeepSpeedFacts, EngineFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning import ddp_memory, fsdp_memory, zero_memory
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.model_facts import Training
from lightning_shard.planning.step_memory import Point, StepMemory, optimizer_point, without_activations
from lightning_shard.planning.traffic import Collective

# An engine's facts to the module that has its ``step_memory``, ``step_points``, ``start_of_fit`` and ``collectives``.
ARITHMETIC: Mapping[type[EngineFacts], Any] = {
    TorchDDPFacts: ddp_memory,
    FSDPFacts: fsdp_memory,
    DeepSpeedFacts: zero_memory,
}


def step_memory(training: Training, engine: EngineFacts) -> StepMemory:
    """What the rank that needs most has resident in the optimizer's step, and what waits for it."""
    return ARITHMETIC[type(engine)].step_memory(training, engine)


def step_points(training: Training, engine: EngineFacts, trace: Trace | None) -> list[Point]:
    """The memory of that rank in its fullest micro-batch, with the trace's activations, and in the step."""
    module = ARITHMETIC[type(engine)]
    memory, followed = module.step_memory(training, engine), trace or without_activations(training)
    points = list(module.step_points(training, engine, memory, followed))
    last = optimizer_point(memory, training, followed, engine.shards if engine.sharded else None)
    # The optimizer reads gradients where the last reduction has put them.
    apart = KindBytes(gradients=min(points[-1].apart.gradients, last.account.device.gradients))
    points.append(replace(last, apart=apart))
    if offloaded := max(segment.offloaded for segment in followed.segments):
        host = MemoryAccount(host=KindBytes(activations=offloaded))
        points = [replace(point, account=point.account + host) for point in points]
    if trace is None:
        # What counts as made by backward is gradients.
        for i, point in enumerate(points):
            kinds = point.account.device
            kinds = replace(kinds, gradients=kinds.gradients + kinds.activations, activations=0)
            points[i] = replace(point, account=replace(point.account, device=kinds))
    return points


def start_points(training: Training, engine: EngineFacts) -> list[Point]:
    """The start of a fit, of engines that may have less in a step; of others nothing."""
    return ARITHMETIC[type(engine)].start_of_fit(training, engine)


def collectives(training: Training, engine: EngineFacts) -> list[Collective]:
    """What one optimizer step sends, without norms, losses and buffers, which are small."""
    return [c for c in ARITHMETIC[type(engine)].collectives(training, engine) if c.ranks > 1 and c.payload]
