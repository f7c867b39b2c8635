"""Predict the memory of the fullest rank and the traffic of one step on any engine.

The cost of a prediction does not grow with the number of ranks. ZeRO shards as in its paper (arXiv 1910.02054, section
3.1). The sources for everything else are named in each engine's module.
"""

from dataclasses import replace
from typing import Any

from lightning_shard.engines.memory_model import DeepSpeedFacts, EngineFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning import ddp_memory, fsdp_memory, zero_memory
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.model_facts import Training
from lightning_shard.planning.step_memory import Point, StepMemory, optimizer_point, without_activations
from lightning_shard.planning.traffic import Collective

# Each module has ``step_memory``, ``step_points``, ``start_of_fit`` and ``collectives``.
ARITHMETIC: dict[type[EngineFacts], Any] = {
    TorchDDPFacts: ddp_memory,
    FSDPFacts: fsdp_memory,
    DeepSpeedFacts: zero_memory,
}


def step_memory(training: Training, engine: EngineFacts) -> StepMemory:
    """The memory of the fullest rank during the optimizer's step."""
    return ARITHMETIC[type(engine)].step_memory(training, engine)


def step_points(training: Training, engine: EngineFacts, trace: Trace | None) -> list[Point]:
    """The memory of the fullest rank in its fullest micro-batch, with the trace's activations, and in the step."""
    module = ARITHMETIC[type(engine)]
    memory, followed = module.step_memory(training, engine), trace or without_activations(training)
    points = list(module.step_points(training, engine, memory, followed))
    last = optimizer_point(memory, training, followed, engine.shards if engine.sharded else None)
    # The optimizer reads gradients from the memory of the last reduction.
    own_stream = KindBytes(gradients=min(points[-1].own_stream.gradients, last.account.device.gradients))
    points.append(replace(last, own_stream=own_stream))
    if offloaded := max(segment.offloaded for segment in followed.segments):
        host = MemoryAccount(host=KindBytes(activations=offloaded))
        points = [replace(point, account=point.account + host) for point in points]
    if trace is None:
        # Without a trace all bytes that backward makes are gradients.
        for i, point in enumerate(points):
            kinds = point.account.device
            kinds = replace(kinds, gradients=kinds.gradients + kinds.activations, activations=0)
            points[i] = replace(point, account=replace(point.account, device=kinds))
    return points


def start_points(training: Training, engine: EngineFacts) -> list[Point]:
    """The memory at the start of a fit, on engines that may hold less in a step. Else an empty list."""
    return ARITHMETIC[type(engine)].start_of_fit(training, engine)


def collectives(training: Training, engine: EngineFacts) -> list[Collective]:
    """The collectives of one optimizer step, without the small ones for norms, losses and buffers."""
    return [c for c in ARITHMETIC[type(engine)].collectives(training, engine) if c.ranks > 1 and c.payload]
