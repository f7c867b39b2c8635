"""Compute the memory and traffic of a rank under torch's DistributedDataParallel (``nn/parallel/distributed.py``)."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_shard.engines.memory_model import FSDPFacts, TorchDDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.model_facts import Training
from lightning_shard.planning.step_memory import Point, StepMemory, gradient_elements, on_device
from lightning_shard.planning.traffic import Collective


def step_memory(training: Training, engine: TorchDDPFacts) -> StepMemory:
    model, policy, trainable = training.model, training.policy, training.model.trainable
    gradients = sum(p.numel for p in trainable) * policy.master.itemsize
    in_buckets = engine.gradient_as_bucket_view
    resident = KindBytes(
        parameters=sum(p.numel * p.stepped_in(policy.master).itemsize for p in model.parameters),
        optimizer=training.optimizer.state_bytes([p.numel for p in model.stepped_parameters], policy.master),
        buffers=model.buffer_bytes,
        # DDP allocates its buckets when it is built. It copies gradients to and from them unless these are views.
        communication=0 if in_buckets else gradients,
    )
    waiting = gradients if training.micro_batches > 1 else 0
    return StepMemory(step=on_device(resident, gradients=gradients), waiting=waiting)


def start_of_fit(training: Training, engine: TorchDDPFacts) -> list[Point]:
    return []  # A step holds all tensors that the start holds.


def step_points(training: Training, engine: TorchDDPFacts, memory: StepMemory, trace: Trace) -> Iterator[Point]:
    """See `predict.step_points`. Backward makes full gradients, which stay."""
    elements = gradient_elements(training.model, lambda p: p.numel)
    total = memory.step.device.gradients
    kept = sum(p.numel for p in training.model.outside) * training.policy.master.itemsize
    base = MemoryAccount(device=replace(memory.step.device, gradients=0))
    done: tuple[str, ...] = ()
    in_buckets = engine.gradient_as_bucket_view
    # Gradients in buckets, and gradients that are added to sums, take no memory of their own.
    in_place = in_buckets or (engine.reduce_at_boundary and memory.waiting > 0)
    for segment in trace.segments:
        # The strategy drops the last step's gradients before forward, which frees those outside of buckets. Sums of
        # micro-batches are outside of buckets.
        gradients = total + memory.waiting if in_buckets else memory.waiting or kept
        if segment.phase == "backward" and not in_place:
            reduced = sum(elements[name] for name in done) * training.policy.master.itemsize
            gradients += reduced + segment.peak_gradients
        activations = segment.activations if in_place else segment.peak - segment.peak_gradients
        kinds = KindBytes(gradients=gradients, activations=activations)
        yield Point(name=segment.name, account=base + MemoryAccount(device=kinds))
        done = segment.complete or done


def collectives(training: Training, engine: TorchDDPFacts | FSDPFacts) -> list[Collective]:
    payload = sum(p.numel for p in training.model.trainable) * training.policy.reduce.itemsize
    times = 1 if engine.reduce_at_boundary else training.micro_batches
    return [Collective(kind="all-reduce", what="gradients", ranks=engine.ranks, payload=payload * times)]
