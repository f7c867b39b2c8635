"""Bytes of a rank under ZeRO's stages 1 and 2, which cut a flat copy of the parameters.

Sources, of DeepSpeed 0.19.8: ``runtime/zero/stage_1_and_2.py``, and ``runtime/bf16_optimizer.py``, which stage 1
becomes with bf16 parameters and fp32 sums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from lightning_shard.engines.facts import DeepSpeedFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts
from lightning_shard.planning.step_memory import Moments, reduction_copies, seen_bytes
from lightning_shard.precision.policy import PrecisionPolicy


def stages_1_2(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> Moments:
    """Masters and state are cut, one flat partition for each of the optimizer's groups; parameters are whole."""
    compute, master = policy.compute, policy.master
    flat = flat_partitions(model.trainable, engine.ranks)
    parameters = flat.whole * compute.itemsize + seen_bytes((p for p in model.parameters if not p.trainable), compute)
    kept = KindBytes(
        masters=flat.partition * master.itemsize,
        optimizer=flat.partition * sum((slot or master).itemsize for slot in optimizer.slots)
        + flat.groups * optimizer.fixed_bytes
        + sum(optimizer.uncut.values()),
    )
    device = KindBytes(parameters=parameters, buffers=model.buffer_bytes)
    offload = engine.optimizer_device != "none"
    if engine.stage == 1 and not offload and compute == torch.bfloat16 and engine.accumulate == torch.float32:
        return _bf16_optimizer(device + kept, flat, model, policy, micro_batches)
    gradients = _gradients(model, engine, policy, flat)
    held = 0
    if micro_batches > 1:
        held = gradients.everything if engine.stage == 1 else gradients.own
    if offload:
        return _offloaded(device, kept, flat, gradients, policy, held, engine.stage)
    device += kept
    # The optimizer steps on a flat copy, where gradients do not lie flat already.
    copy = 0 if gradients.compact and engine.accumulate == master else flat.partition * master.itemsize
    in_backward = gradients.everything if engine.stage == 1 else gradients.own + gradients.largest
    reducing = gradients.buckets + gradients.copies
    waiting = held if engine.stage == 1 else 0
    # Stage 2 makes room for whole parameters of its partition when the copies are gone.
    late = 0 if gradients.compact or held else min(gradients.own, gradients.copies)
    return Moments(
        # Stage 1 makes its buckets in the first micro-batch, and lets go of them at the boundary.
        forward=MemoryAccount(
            device=replace(device, gradients=held, communication=gradients.buckets if waiting else 0)
        ),
        backward=MemoryAccount(device=replace(device, gradients=in_backward, communication=reducing)),
        step=MemoryAccount(device=replace(device, gradients=gradients.own, communication=copy)),
        at_end=gradients.at_end,
        made=0 if engine.stage == 1 else gradients.largest,
        moved=gradients.moved if engine.stage == 1 else late,
        waiting=waiting,
    )


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """The flat partitions of the optimizer's groups."""

    whole: int
    """Elements of all groups, each padded to two for each rank."""

    partition: int
    """Elements of this rank's part of them."""

    groups: int
    overlapping: int
    """Elements of the parameters that have a part in the partition, of the rank where these are most."""


def flat_partitions(parameters: Sequence[ParameterFacts], ranks: int) -> _Flat:
    """How stages 1 and 2 lie: each group's parameters behind one another, padded to ``2 * ranks``, cut evenly."""
    groups: dict[int, list[int]] = defaultdict(list)
    for p in parameters:
        groups[p.group].append(p.numel)
    whole = partition = overlapping = 0
    for sizes in groups.values():
        padded = -(-sum(sizes) // (2 * ranks)) * 2 * ranks
        whole, partition = whole + padded, partition + padded // ranks
        overlapping += _most_overlapping(sizes, padded // ranks)
    return _Flat(whole=whole, partition=partition, groups=len(groups), overlapping=overlapping)


def _most_overlapping(sizes: Sequence[int], partition: int) -> int:
    """The most elements of parameters that have a part in one partition."""
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    most = 0
    # Where no parameter begins or ends, a partition lies in one parameter alone.
    for edge in {*starts, *(end - 1 for end in ends)} if partition else ():
        low = max(0, edge) // partition * partition
        first, last = bisect_right(ends, low), bisect_left(starts, low + partition)
        most = max(most, ends[last - 1] - starts[first] if first < last else 0)
    return most


def _bf16_optimizer(
    always: KindBytes, flat: _Flat, model: ModelFacts, policy: PrecisionPolicy, micro_batches: int
) -> Moments:
    """``BF16_Optimizer``: one fp32 buffer of all gradients for as long as the run lasts, beside backward's own.

    Backward's own are set to zero, and not freed, before the next micro-batch, and are there in the step.
    """
    always = replace(always, gradients=flat.whole * torch.float32.itemsize)
    raw = sum(p.numel for p in model.trainable) * policy.compute.itemsize
    return Moments(
        forward=MemoryAccount(device=replace(always, gradients=always.gradients + (raw if micro_batches > 1 else 0))),
        backward=MemoryAccount(device=replace(always, gradients=always.gradients + raw)),
        step=MemoryAccount(device=always),
        left=raw,
        waiting=raw if micro_batches > 1 else 0,
    )


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Bytes of gradients in stages 1 and 2."""

    compact: bool
    """Whether they are summed in a flat fp32 partition beside 16-bit parameters."""

    own: int
    """Of those that this rank keeps until the step."""

    everything: int
    """Of all, as stage 1 sums them until the boundary."""

    buckets: int
    """Of the buffers that they are reduced in."""

    copies: int
    """Of what the reduction of a bucket copies: flattened, and in the dtype of the network where that is another."""

    at_end: int
    """Of these copies, those that are made after backward alone."""

    moved: int
    """Of those that stage 1 sums, what is in a bucket or dropped when the partition is made, less the partition."""

    largest: int
    """Of the largest, as backward makes it."""


def _gradients(model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, flat: _Flat) -> _Gradients:
    compute, sums = policy.compute, engine.accumulate
    separate = compute != sums
    compact = separate and sums == torch.float32
    in_bucket = sums if separate and engine.stage == 1 else compute
    buckets = engine.reduce_bucket_size * in_bucket.itemsize * (2 if engine.overlap_comm else 1)
    buckets = buckets if engine.contiguous_gradients or engine.optimizer_device != "none" else 0
    numel = [p.numel for p in model.trainable]
    converted = policy.reduce.itemsize if policy.reduce != in_bucket else 0
    copies, at_end = reduction_copies(model, engine, in_bucket.itemsize + converted)
    everything = sum(numel) * (sums if separate else compute).itemsize
    # Without a flat partition of their own they stay whole for every parameter that has a part in it.
    own = flat.partition * sums.itemsize if compact else flat.overlapping * compute.itemsize
    return _Gradients(
        compact=compact,
        own=own,
        everything=everything,
        # Parameters of the partition get theirs when the copies are gone, a flat partition is added to from them.
        moved=min(everything, engine.reduce_bucket_size * in_bucket.itemsize)
        - (own if compact else max(0, own - copies)),
        buckets=buckets,
        copies=copies,
        # Stage 1 reduces at the boundary, after backward.
        at_end=at_end if engine.stage == 2 else copies,
        largest=max(numel, default=0) * compute.itemsize,
    )


def _offloaded(
    device: KindBytes,
    kept: KindBytes,
    flat: _Flat,
    gradients: _Gradients,
    policy: PrecisionPolicy,
    held: int,
    stage: int,
) -> Moments:
    """Masters, state and gradients lie on the host; what is reduced passes through the device."""
    staging = flat.partition * policy.compute.itemsize + gradients.largest
    if held and not gradients.compact:
        staging += flat.overlapping * policy.master.itemsize
    host = kept + KindBytes(gradients=flat.partition * policy.master.itemsize, communication=staging)
    on_device = gradients.own if gradients.compact else 0
    device = replace(device, communication=gradients.largest)
    in_backward = gradients.everything if stage == 1 else on_device + gradients.largest
    in_flight = gradients.buckets + gradients.copies + gradients.largest
    reducing = replace(device, gradients=in_backward, communication=in_flight)
    waiting = held if stage == 1 else 0
    return Moments(
        forward=MemoryAccount(
            device=replace(
                device,
                gradients=waiting or (on_device if held else 0),
                communication=device.communication + (gradients.buckets if waiting else 0),
            ),
            host=host,
        ),
        backward=MemoryAccount(device=reducing, host=host),
        step=MemoryAccount(device=replace(device, gradients=on_device), host=host),
        at_end=gradients.at_end,
        made=0 if stage == 1 else gradients.largest,
        moved=gradients.moved if stage == 1 else 0,
        waiting=waiting,
    )
