"""Bytes of a rank under DeepSpeed's ZeRO at the points of a step, without activations.

Sources, of DeepSpeed 0.19.8: ``runtime/zero/stage_1_and_2.py``, ``runtime/bf16_optimizer.py`` (which stage 1
becomes with bf16 parameters and fp32 sums), ``runtime/zero/stage3.py``, ``runtime/zero/partition_parameters.py`` and
``runtime/swap_tensor/``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts, Zero
from lightning_shard.planning.moments import Moments, optimizer_bytes
from lightning_shard.precision.policy import PrecisionPolicy

MIN_SWAPPED_BYTES = 1024**2
"""What is smaller stays in memory under NVMe offload (``swap_tensor/utils.py``, ``MIN_AIO_BYTES``)."""

ALLREDUCE_BUCKET = 500_000_000
"""Elements of gradients that stage 0 puts together at a time (``runtime/engine.py``, MEMORY_OPT_ALLREDUCE_SIZE)."""


def zero_moments(
    model: ModelFacts, engine: Zero, policy: PrecisionPolicy, optimizer: OptimizerFacts, *, micro_batches: int
) -> Moments:
    """The moments of the rank that holds most."""
    if engine.stage == 0:
        return _stage_0(model, engine, policy, optimizer, micro_batches)
    moments = (_stage_3 if engine.stage == 3 else _stages_1_2)(model, engine, policy, optimizer, micro_batches)
    frozen = _kept_frozen(model, engine, policy)
    return replace(
        moments, forward=moments.forward + frozen, backward=moments.backward + frozen, step=moments.step + frozen
    )


def _kept_frozen(model: ModelFacts, engine: Zero, policy: PrecisionPolicy) -> MemoryAccount:
    """This rank's share of frozen parameters that the cast rounded: it is kept on the host for checkpoints."""
    total = 0
    for p in model.parameters:
        rounded = p.dtype.is_floating_point and torch.promote_types(p.dtype, policy.compute) != policy.compute
        if rounded and not p.trainable:
            total += -(-p.numel // engine.ranks) * p.dtype.itemsize
    return MemoryAccount(host=KindBytes(masters=total))


def _seen(parameters: Iterable[ParameterFacts], compute: torch.dtype) -> int:
    return sum(p.numel * p.seen_in(compute).itemsize for p in parameters)


def _stage_0(
    model: ModelFacts, engine: Zero, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> Moments:
    """Everything whole; gradients are flattened into buckets at the boundary."""
    numel = sum(p.numel for p in model.trainable)
    gradients = numel * policy.compute.itemsize
    resting = KindBytes(
        parameters=_seen(model.parameters, policy.compute),
        optimizer=optimizer_bytes(((p.numel, policy.master) for p in model.trainable), optimizer),
        buffers=model.buffer_bytes,
    )
    bucket = min(numel, ALLREDUCE_BUCKET) * policy.reduce.itemsize
    return Moments(
        forward=MemoryAccount(device=replace(resting, gradients=gradients if micro_batches > 1 else 0)),
        backward=MemoryAccount(device=replace(resting, gradients=gradients, communication=bucket)),
        step=MemoryAccount(device=replace(resting, gradients=gradients)),
        at_end=bucket,
    )


def _copies(model: ModelFacts, engine: Zero, per_element: int) -> tuple[int, int]:
    """Bytes of the copies that the reduction of a bucket makes, and those of them that are made after backward alone.

    What fits into one bucket is reduced when all of it is there.
    """
    numel = sum(p.numel for p in model.trainable)
    copies = min(numel, engine.reduce_bucket) * per_element
    return copies, copies if numel <= engine.reduce_bucket else 0


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


def _stages_1_2(
    model: ModelFacts, engine: Zero, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> Moments:
    """Masters and state are cut, one flat partition for each of the optimizer's groups; parameters are whole."""
    compute, master = policy.compute, policy.master
    flat = flat_partitions(model.trainable, engine.ranks)
    parameters = flat.whole * compute.itemsize + _seen((p for p in model.parameters if not p.trainable), compute)
    kept = KindBytes(
        masters=flat.partition * master.itemsize,
        optimizer=flat.partition * sum((slot or master).itemsize for slot in optimizer.slots)
        + flat.groups * optimizer.fixed_bytes
        + sum(optimizer.uncut.values()),
    )
    device = KindBytes(parameters=parameters, buffers=model.buffer_bytes)
    offload = engine.optimizer != "none"
    if engine.stage == 1 and not offload and compute == torch.bfloat16 and engine.accumulate == torch.float32:
        return _bf16_optimizer(device + kept, flat, model, policy)
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
    return Moments(
        forward=MemoryAccount(device=replace(device, gradients=held)),
        backward=MemoryAccount(device=replace(device, gradients=in_backward, communication=reducing)),
        step=MemoryAccount(device=replace(device, gradients=gradients.own, communication=copy)),
        at_end=gradients.at_end,
    )


def _bf16_optimizer(always: KindBytes, flat: _Flat, model: ModelFacts, policy: PrecisionPolicy) -> Moments:
    """``BF16_Optimizer``: one fp32 buffer of all gradients for as long as the run lasts, beside backward's own."""
    always = replace(always, gradients=flat.whole * torch.float32.itemsize)
    raw = sum(p.numel for p in model.trainable) * policy.compute.itemsize
    return Moments(
        forward=MemoryAccount(device=always),
        backward=MemoryAccount(device=replace(always, gradients=always.gradients + raw)),
        step=MemoryAccount(device=always),
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

    largest: int
    """Of the largest, as backward makes it."""


def _gradients(model: ModelFacts, engine: Zero, policy: PrecisionPolicy, flat: _Flat) -> _Gradients:
    compute, sums = policy.compute, engine.accumulate
    separate = compute != sums
    compact = separate and sums == torch.float32
    in_bucket = sums if separate and engine.stage == 1 else compute
    buckets = engine.reduce_bucket * in_bucket.itemsize * (2 if engine.overlap_comm else 1)
    numel = [p.numel for p in model.trainable]
    converted = policy.reduce.itemsize if policy.reduce != in_bucket else 0
    copies, at_end = _copies(model, engine, in_bucket.itemsize + converted)
    return _Gradients(
        compact=compact,
        # Without a flat partition of their own they stay whole for every parameter that has a part in it.
        own=flat.partition * sums.itemsize if compact else flat.overlapping * compute.itemsize,
        everything=sum(numel) * (sums if separate else compute).itemsize,
        buckets=buckets if engine.contiguous_gradients or engine.optimizer != "none" else 0,
        copies=copies,
        at_end=at_end,
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
    return Moments(
        forward=MemoryAccount(device=replace(device, gradients=on_device if held else 0), host=host),
        backward=MemoryAccount(device=reducing, host=host),
        step=MemoryAccount(device=replace(device, gradients=on_device), host=host),
        at_end=gradients.at_end,
    )


def _piece(parameter: ParameterFacts, ranks: int) -> int:
    return -(-parameter.numel // ranks)


def _stage_3(
    model: ModelFacts, engine: Zero, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> Moments:
    compute, master, sums, ranks = policy.compute, policy.master, engine.accumulate, engine.ranks
    trainable = model.trainable
    own = sum(_piece(p, ranks) for p in trainable)
    shards = MemoryAccount(device=KindBytes(buffers=model.buffer_bytes)) + _shards(model, engine, compute)
    persistent = persistent_parameters(model.parameters, engine)
    offload = engine.optimizer != "none"
    groups = sub_groups(trainable, engine)
    slots = sum((slot or master).itemsize for slot in optimizer.slots)
    swapped = sum(g for g in groups if engine.optimizer == "nvme" and g * master.itemsize >= MIN_SWAPPED_BYTES)
    in_memory = own - swapped
    # DeepSpeed means to share masters with parameters of the same dtype, but compares a device with its name.
    state = KindBytes(
        masters=in_memory * master.itemsize,
        optimizer=in_memory * slots + len(groups) * optimizer.fixed_bytes + sum(optimizer.uncut.values()),
    )
    files = KindBytes(masters=swapped * master.itemsize, optimizer=swapped * slots)
    # One flat buffer of sums, and under offload the optimizer's own beside it, for as long as the run lasts.
    gradients = KindBytes(gradients=own * sums.itemsize + (in_memory * master.itemsize if offload else 0))
    bucket = engine.reduce_bucket * policy.reduce.itemsize if engine.contiguous_gradients else 0
    gathered = _seen(persistent, compute)
    always = shards + MemoryAccount(device=KindBytes(communication=bucket, gathered=gathered), nvme=files)
    if offload:
        always += MemoryAccount(host=state + gradients)
        if engine.optimizer == "nvme":
            buffers = max(engine.optimizer_buffers, len(optimizer.slots) + 3) * max(groups, default=0)
            always += MemoryAccount(host=KindBytes(communication=buffers * master.itemsize))
    else:
        always += MemoryAccount(device=state + gradients)
    live = live_elements(model, engine, {p.fqn for p in persistent}) * compute.itemsize
    raw = max((p.numel for p in trainable), default=0) * compute.itemsize
    copy = 0 if offload else max(groups, default=0) * master.itemsize
    computing = MemoryAccount(device=KindBytes(gathered=live))
    # A bucket's gradients are put together anew for the reduce-scatter (``reduce_scatter_coalesced``).
    copies, at_end = _copies(model, engine, policy.reduce.itemsize)
    reducing = MemoryAccount(device=KindBytes(gradients=raw, communication=copies))
    return Moments(
        forward=always + computing,
        backward=always + computing + reducing,
        step=always + MemoryAccount(device=KindBytes(communication=copy)),
        at_end=at_end,
    )


def _shards(model: ModelFacts, engine: Zero, compute: torch.dtype) -> MemoryAccount:
    """This rank's pieces of the parameters, where they wait, and the buffers of NVMe."""
    place: dict[str, int] = {"device": 0, "host": 0, "nvme": 0}
    in_cpu = 0
    for p in model.parameters:
        piece = _piece(p, engine.ranks)
        size = piece * p.seen_in(compute).itemsize
        where = "device" if engine.parameters == "none" else "host"
        if engine.parameters == "nvme":
            # Pieces of trainable parameters are moved into host memory up to a limit, and small ones are never swapped.
            if p.trainable and in_cpu + piece <= engine.max_in_cpu:
                in_cpu += piece
            elif size >= MIN_SWAPPED_BYTES:
                where = "nvme"
        place[where] += size
        if engine.hpz > 1:
            place[where] += -(-p.numel // engine.hpz) * p.seen_in(compute).itemsize
    account = MemoryAccount(**{name: KindBytes(parameters=count) for name, count in place.items()})
    if engine.parameters == "nvme":
        buffers = engine.parameter_buffers * engine.parameter_buffer_size * compute.itemsize
        account += MemoryAccount(host=KindBytes(communication=buffers))
    return account


def persistent_parameters(parameters: Sequence[ParameterFacts], engine: Zero) -> list[ParameterFacts]:
    """The small parameters that stage 3 keeps whole on every rank (``parameter_offload.py``)."""
    found, total = [], 0
    limit = engine.model_persistence_threshold
    for p in parameters:
        if p.numel <= engine.persistence_threshold and (limit is None or total + p.numel <= limit):
            found.append(p)
            total += p.numel
    return found


def sub_groups(parameters: Sequence[ParameterFacts], engine: Zero) -> list[int]:
    """Elements of the pieces that stage 3 steps at a time (``_create_fp16_sub_groups``)."""
    groups: dict[int, list[int]] = defaultdict(list)
    for p in parameters:
        groups[p.group].append(_piece(p, engine.ranks))
    found: list[int] = []
    for pieces in groups.values():
        current = 0
        for index, piece in enumerate(pieces):
            current += piece
            if current >= engine.sub_group or index == len(pieces) - 1:
                found.append(current)
                current = 0
    return found


def live_elements(model: ModelFacts, engine: Zero, persistent: set[str]) -> int:
    """The most elements that are gathered at a time, beside persistent ones."""
    order = tuple(name for name in model.units if name)
    return max(live_by_position(model, engine, persistent, order).values())


def live_by_position(
    model: ModelFacts, engine: Zero, persistent: set[str], order: Sequence[str]
) -> dict[tuple[str, str], int]:
    """Elements that are gathered while each unit computes, beside persistent ones; by phase and unit.

    A unit is freed after use unless it is used again within ``max_reuse_distance`` elements; the next ones are gathered
    ahead, a bucket's worth, as long as no more than ``max_live`` are there (``partitioned_param_coordinator.py``). What
    is in no unit is taken as used at the beginning and at the end of forward, in halves of a pass each.
    """
    sizes = {name: sum(p.numel for p in members if p.fqn not in persistent) for name, members in model.units.items()}
    names = ["", *order, ""]
    steps = [("forward", name) for name in names] + [("backward", name) for name in reversed(names)]
    # How far it is from the end of each step to the next use of each unit.
    found: dict[tuple[str, str], int] = {}
    for index, (phase, unit) in enumerate(steps):
        live, distance = {unit}, 0
        used = {name for _, name in steps[:index]}
        for _, later in steps[index + 1 :]:
            if distance >= engine.max_reuse_distance:
                break
            if later in used:
                live.add(later)
            distance += sizes.get(later, 0)
        count = sum(sizes.get(name, 0) for name in live)
        ahead = min(engine.prefetch_bucket, max(0, engine.max_live - count), sum(sizes.values()) - count)
        found[phase, unit] = max(found.get((phase, unit), 0), count + ahead)
    return found
