"""Bytes of a rank under ZeRO's stages 1 and 2, which partition a flat copy of the parameters.

Sources, of DeepSpeed 0.19.8: ``runtime/zero/stage_1_and_2.py``, and ``runtime/bf16_optimizer.py``, which stage 1
becomes with bf16 parameters and fp32 sums.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    model, policy = training.model, training.policy
    compute, master = policy.compute, policy.master
    flat = _flat_partitions(model.trainable, engine.ranks)
    frozen = compute_bytes((p for p in model.parameters if not p.trainable), compute)
    device = KindBytes(parameters=flat.full * compute.itemsize + frozen, buffers=model.buffer_bytes)
    slots = training.optimizer.state_bytes(flat.partitions, master)
    state = KindBytes(masters=flat.own * master.itemsize, optimizer=slots)
    offload = engine.optimizer_device != "none"
    if engine.stage == 1 and not offload and compute == torch.bfloat16 and engine.accumulate == torch.float32:
        return _bf16_optimizer(device + state, flat, training)
    gradients, stage_1 = _gradients(training, engine, flat), engine.stage == 1
    summed = (gradients.full if stage_1 else gradients.own) if training.micro_batches > 1 else 0
    # Stage 1 allocates its buckets in the first micro-batch, and frees them at the accumulation boundary.
    waiting = summed if stage_1 else 0
    if offload:
        # Masters, state and gradients are resident on the host; what is reduced passes through the device.
        own, late, passing, update = gradients.own * gradients.in_flat_partition, 0, gradients.largest, 0
        staging = flat.own * compute.itemsize + passing
        if summed and not gradients.in_flat_partition:
            staging += flat.overlapping * master.itemsize
        host = state + KindBytes(gradients=flat.own * master.itemsize, communication=staging)
    else:
        device, host, own, passing = device + state, KindBytes(), gradients.own, 0
        # The optimizer steps with a flat copy, unless gradients are summed in a flat partition of the masters' dtype.
        update = 0 if gradients.in_flat_partition and engine.accumulate == master else flat.own * master.itemsize
        # Stage 2 allocates the gradients of its partition's parameters after the bucket's copies are freed.
        late = 0 if gradients.in_flat_partition or summed else min(own, gradients.copies)

    def account(kept: int, communication: int) -> MemoryAccount:
        return MemoryAccount(device=replace(device, gradients=kept, communication=communication), host=host)

    return ZeroMemory(
        forward=account(waiting or (own if summed else 0), passing + (gradients.buckets if waiting else 0)),
        backward=account(
            gradients.full if stage_1 else own + gradients.largest, gradients.buckets + gradients.copies + passing
        ),
        step=account(own, passing + update),
        copies_after_backward=gradients.copies_after_backward,
        newest_gradient=0 if stage_1 else gradients.largest,
        freed_in_reduction=gradients.freed_in_reduction if stage_1 else late,
        waiting=waiting,
    )


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """The flat tensors of the optimizer's groups, in elements."""

    full: int  # Of all ranks' partitions.
    partitions: tuple[int, ...]  # Of one rank's partition of each group.
    overlapping: int  # Of the parameters that have a part in one rank's partitions, on the rank where these are most.

    @property
    def own(self) -> int:
        """Of one rank's partitions."""
        return sum(self.partitions)


def _flat_partitions(parameters: Sequence[ParameterFacts], ranks: int) -> _Flat:
    """Each group's parameters follow one another in a flat tensor, padded to ``2 * ranks``, split evenly."""
    groups: dict[int, list[int]] = defaultdict(list)
    for p in parameters:
        groups[p.group].append(p.numel)
    partitions = [-(-sum(sizes) // (2 * ranks)) * 2 for sizes in groups.values()]
    overlapping = sum(map(_most_overlapping, groups.values(), partitions))
    return _Flat(full=sum(partitions) * ranks, partitions=tuple(partitions), overlapping=overlapping)


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


def _bf16_optimizer(always: KindBytes, flat: _Flat, training: Training) -> ZeroMemory:
    """``BF16_Optimizer``: one fp32 buffer of all gradients for as long as the run lasts, beside backward's own.

    Backward's own are set to zero, and not freed, before the next micro-batch, and are resident in the step.
    """
    sums = flat.full * torch.float32.itemsize
    own = sum(p.numel for p in training.model.trainable) * training.policy.compute.itemsize
    waiting = own if training.micro_batches > 1 else 0
    return ZeroMemory(
        forward=on_device(always, gradients=sums + waiting),
        backward=on_device(always, gradients=sums + own),
        step=on_device(always, gradients=sums),
        left_in_step=own,
        waiting=waiting,
    )


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Gradients in stages 1 and 2, in bytes."""

    in_flat_partition: bool  # Whether this rank's are summed in a flat fp32 partition beside 16-bit parameters.
    own: int  # Of this rank's, as they are kept until the step.
    full: int  # Of all, as stage 1 sums them until the accumulation boundary.
    largest: int  # Of the largest parameter's, as backward makes it.
    buckets: int  # Of the buffers that they are reduced in.
    # Of what the reduction of a bucket copies: flattened, and in ``reduce`` where the bucket has another dtype.
    copies: int
    copies_after_backward: int  # Of these copies, those that are allocated after backward only.
    # Of ``full``, what stage 1 no longer has at the peak of its reduction: the gradients that were copied into the
    # first bucket are freed, less what this rank has allocated of ``own`` at that time.
    freed_in_reduction: int


def _gradients(training: Training, engine: DeepSpeedFacts, flat: _Flat) -> _Gradients:
    model, policy = training.model, training.policy
    compute, sums = policy.compute, engine.accumulate
    in_flat_partition = compute != sums and sums == torch.float32
    bucket_dtype = sums if engine.stage == 1 else compute
    buckets = engine.reduce_bucket_size * bucket_dtype.itemsize * (2 if engine.overlap_comm else 1)
    numel = [p.numel for p in model.trainable]
    converted = policy.reduce.itemsize if policy.reduce != bucket_dtype else 0
    copies, after_backward = reduction_copies(model, engine, bucket_dtype.itemsize + converted)
    full = sum(numel) * sums.itemsize
    # Outside of a flat partition, each parameter that has a part in this rank's keeps its full gradient.
    own = flat.own * sums.itemsize if in_flat_partition else flat.overlapping * compute.itemsize
    # The flat partition is allocated while the bucket's copies are there, full gradients once they are freed.
    allocated = own if in_flat_partition else max(0, own - copies)
    return _Gradients(
        in_flat_partition=in_flat_partition,
        own=own,
        full=full,
        largest=max(numel, default=0) * compute.itemsize,
        buckets=buckets if engine.contiguous_gradients or engine.optimizer_device != "none" else 0,
        copies=copies,
        # Stage 1 reduces at the accumulation boundary, after backward.
        copies_after_backward=after_backward if engine.stage == 2 else copies,
        freed_in_reduction=min(full, engine.reduce_bucket_size * bucket_dtype.itemsize) - allocated,
    )


def reduction_copies(model: ModelFacts, engine: DeepSpeedFacts, per_element: int) -> tuple[int, int]:
    """Bytes of the copies that the reduction of a bucket makes, and how many of them are made after backward only.

    Gradients that fit into one bucket are reduced when all of them are there.
    """
    numel = sum(p.numel for p in model.trainable)
    copies = min(numel, engine.reduce_bucket_size) * per_element
    return copies, copies if numel <= engine.reduce_bucket_size else 0
