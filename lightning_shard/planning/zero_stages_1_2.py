"""Bytes of a rank under ZeRO's stages 1 and 2, which partition a flat copy of the parameters.

Sources, of DeepSpeed 0.19.8: ``runtime/zero/stage_1_and_2.py``, and ``runtime/bf16_optimizer.py``, which stage 1
becomes with bf16 parameters and fp32 sums.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from lightning_shard.engines.facts import DeepSpeedFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, ParameterFacts, Training
from lightning_shard.planning.step_memory import ZeroMemory, compute_bytes, on_device


def stages_1_2(training: Training, engine: DeepSpeedFacts) -> ZeroMemory:
    """See `lightning_shard.planning.predict.step_memory`.

    Masters and optimizer state are one flat partition for each of the optimizer's groups; parameters are replicated.
    """
    model, policy, stage_1 = training.model, training.policy, engine.stage == 1
    compute, master, sums = policy.compute, policy.master, engine.accumulate
    partitions, overlapping = _flat_partitions(model.trainable, engine.ranks)
    flat = sum(partitions)
    frozen = compute_bytes((p for p in model.parameters if not p.trainable), compute)
    device = KindBytes(parameters=flat * engine.ranks * compute.itemsize + frozen, buffers=model.buffer_bytes)
    state = KindBytes(masters=flat * master.itemsize, optimizer=training.optimizer.state_bytes(partitions, master))
    offload = engine.optimizer_device != "none"
    if stage_1 and not offload and compute == torch.bfloat16 and sums == torch.float32:
        return _bf16_optimizer(device + state, flat * engine.ranks, training)
    numel = [p.numel for p in model.trainable]
    full, largest = sum(numel) * sums.itemsize, max(numel, default=0) * compute.itemsize
    # Summed in a flat fp32 partition beside 16-bit parameters; else each parameter that has a part in this rank's
    # partition keeps its full gradient.
    in_partition = compute != sums and sums == torch.float32
    own = flat * sums.itemsize if in_partition else overlapping * compute.itemsize
    buckets, copies, copies_after = _reduction(training, engine)
    summed = (full if stage_1 else own) if training.micro_batches > 1 else 0
    # Stage 1 allocates its buckets in the first micro-batch, and frees them at the accumulation boundary.
    waiting = summed if stage_1 else 0
    if offload:
        # Masters, state and gradients are resident on the host; what is reduced passes through the device.
        late, kept, passing, update = 0, own * in_partition, largest, 0
        staging = (
            flat * compute.itemsize + passing + (overlapping * master.itemsize if summed and not in_partition else 0)
        )
        host = state + KindBytes(gradients=flat * master.itemsize, communication=staging)
    else:
        device, host, kept, passing = device + state, KindBytes(), own, 0
        # The optimizer steps with a flat copy, unless gradients are summed in a flat partition of the masters' dtype.
        update = 0 if in_partition and sums == master else flat * master.itemsize
        # Stage 2 allocates the gradients of its partition's parameters after the bucket's copies are freed.
        late = 0 if in_partition or summed else min(own, copies)
    # At the peak of stage 1's reduction what was copied into the first bucket is freed, and of this rank's own there is
    # a flat partition, which is allocated while the bucket's copies are there, or full gradients once they are freed.
    bucket = min(full, engine.reduce_bucket_size * (sums if stage_1 else compute).itemsize)
    freed = bucket - (own if in_partition else max(0, own - copies))

    def account(gradients: int, communication: int) -> MemoryAccount:
        return MemoryAccount(device=replace(device, gradients=gradients, communication=communication), host=host)

    return ZeroMemory(
        forward=account(waiting or (kept if summed else 0), passing + (buckets if waiting else 0)),
        backward=account(full if stage_1 else kept, buckets + copies - copies_after + passing),
        step=account(kept, passing + update),
        copies_after_backward=copies_after,
        newest_gradient=0 if stage_1 else largest,
        freed_in_reduction=freed if stage_1 else late,
        waiting=waiting,
    )


def _flat_partitions(parameters: Sequence[ParameterFacts], ranks: int) -> tuple[list[int], int]:
    """Elements of one rank's partition of each group, and of the parameters that have a part in these, where most have.

    Each group's parameters follow one another in a flat tensor, padded to ``2 * ranks``, split evenly.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for p in parameters:
        groups[p.group].append(p.numel)
    partitions = [-(-sum(sizes) // (2 * ranks)) * 2 for sizes in groups.values()]
    return partitions, sum(map(_most_overlapping, groups.values(), partitions))


def _most_overlapping(sizes: Sequence[int], partition: int) -> int:
    """The most elements of parameters that have a part in one partition."""
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    most = 0
    # A partition in which no parameter begins or ends is inside of one parameter.
    for edge in {*starts, *(end - 1 for end in ends)} if partition else ():
        low = max(0, edge) // partition * partition
        first, last = bisect_right(ends, low), bisect_left(starts, low + partition)
        most = max(most, ends[last - 1] - starts[first] if first < last else 0)
    return most


def _bf16_optimizer(always: KindBytes, flat: int, training: Training) -> ZeroMemory:
    """``BF16_Optimizer``: one fp32 buffer of all gradients for as long as the run lasts, beside backward's own.

    Backward's own are set to zero, and not freed, before the next micro-batch, and are resident in the step.
    """
    sums = flat * torch.float32.itemsize
    own = sum(p.numel for p in training.model.trainable) * training.policy.compute.itemsize
    waiting = own if training.micro_batches > 1 else 0
    return ZeroMemory(
        forward=on_device(always, gradients=sums + waiting),
        backward=on_device(always, gradients=sums + own),
        step=on_device(always, gradients=sums),
        left_in_step=own,
        waiting=waiting,
    )


def _reduction(training: Training, engine: DeepSpeedFacts) -> tuple[int, int, int]:
    """Bytes of the buckets, of what the reduction of one copies, and of these copies those made after backward only.

    Copies are flattened, and in ``reduce`` where the bucket has another dtype.
    """
    stage_1, reduce = engine.stage == 1, training.policy.reduce
    dtype = engine.accumulate if stage_1 else training.policy.compute
    converted = reduce.itemsize if reduce != dtype else 0
    copies, after_backward = reduction_copies(training.model, engine, dtype.itemsize + converted)
    has_buckets = engine.contiguous_gradients or engine.optimizer_device != "none"
    buckets = engine.reduce_bucket_size * dtype.itemsize * (2 if engine.overlap_comm else 1) if has_buckets else 0
    # Stage 1 reduces at the accumulation boundary, after backward.
    return buckets, copies, copies if stage_1 else after_backward


def reduction_copies(model: ModelFacts, engine: DeepSpeedFacts, per_element: int) -> tuple[int, int]:
    """Bytes of the copies that the reduction of a bucket makes, and how many of them are made after backward only.

    Gradients that fit into one bucket are reduced when all of them are there.
    """
    numel = sum(p.numel for p in model.trainable)
    copies = min(numel, engine.reduce_bucket_size) * per_element
    return copies, copies if numel <= engine.reduce_bucket_size else 0
