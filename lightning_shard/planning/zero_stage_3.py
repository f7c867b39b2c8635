"""Bytes of a rank under ZeRO-3, which cuts each parameter.

Sources, of DeepSpeed 0.19.8: ``runtime/zero/stage3.py``, ``runtime/zero/partition_parameters.py``,
``runtime/zero/partitioned_param_coordinator.py`` and ``runtime/swap_tensor/``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from lightning_shard.engines.facts import DeepSpeedFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts
from lightning_shard.planning.step_memory import Moments, reduction_copies, seen_bytes
from lightning_shard.precision.policy import PrecisionPolicy

MIN_SWAPPED_BYTES = 1024**2
"""What is smaller stays in memory under NVMe offload (``swap_tensor/utils.py``, ``MIN_AIO_BYTES``)."""


def stage_3(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> Moments:
    compute, master, sums, ranks = policy.compute, policy.master, engine.accumulate, engine.ranks
    trainable = model.trainable
    own = sum(_piece(p, ranks) for p in trainable)
    shards = MemoryAccount(device=KindBytes(buffers=model.buffer_bytes)) + _shards(model, engine, compute)
    persistent = persistent_parameters(model.parameters, engine)
    offload = engine.optimizer_device != "none"
    groups = sub_groups(trainable, engine)
    slots = sum((slot or master).itemsize for slot in optimizer.slots)
    swapped = sum(g for g in groups if engine.optimizer_device == "nvme" and g * master.itemsize >= MIN_SWAPPED_BYTES)
    in_memory = own - swapped
    # DeepSpeed means to share masters with parameters of the same dtype, but compares a device with its name.
    state = KindBytes(
        masters=in_memory * master.itemsize,
        optimizer=in_memory * slots + len(groups) * optimizer.fixed_bytes + sum(optimizer.uncut.values()),
    )
    files = KindBytes(masters=swapped * master.itemsize, optimizer=swapped * slots)
    # One flat buffer of sums, and under offload the optimizer's own beside it, for as long as the run lasts.
    gradients = KindBytes(gradients=own * sums.itemsize + (in_memory * master.itemsize if offload else 0))
    bucket = engine.reduce_bucket_size * policy.reduce.itemsize if engine.contiguous_gradients else 0
    gathered = 0 if engine.forward_uses_shards else seen_bytes(persistent, compute)
    always = shards + MemoryAccount(device=KindBytes(communication=bucket, gathered=gathered), nvme=files)
    if offload:
        always += MemoryAccount(host=state + gradients)
        if engine.optimizer_device == "nvme":
            # One for each tensor of a sub-group that is swapped, and one that new slots are written through.
            needed = len(optimizer.slots) + 2 if swapped else 0
            buffers = max(engine.optimizer_buffer_count, needed) * max(groups, default=0)
            always += MemoryAccount(host=KindBytes(communication=buffers * master.itemsize))
    else:
        always += MemoryAccount(device=state + gradients)
    live = live_elements(model, engine, {p.fqn for p in persistent}) * compute.itemsize
    raw = max((p.numel for p in trainable), default=0) * compute.itemsize
    copy = 0 if offload else max(groups, default=0) * master.itemsize
    computing = MemoryAccount(device=KindBytes(gathered=live))
    # A bucket's gradients are put together anew for the reduce-scatter (``reduce_scatter_coalesced``).
    copies, at_end = reduction_copies(model, engine, policy.reduce.itemsize)
    reducing = MemoryAccount(device=KindBytes(gradients=raw, communication=copies))
    return Moments(
        forward=always + computing,
        backward=always + computing + reducing,
        step=always + MemoryAccount(device=KindBytes(communication=copy)),
        at_end=at_end,
        made=raw,
    )


def _piece(parameter: ParameterFacts, ranks: int) -> int:
    return -(-parameter.numel // ranks)


def _shards(model: ModelFacts, engine: DeepSpeedFacts, compute: torch.dtype) -> MemoryAccount:
    """This rank's pieces of the parameters, where they wait, and the buffers of NVMe."""
    place: dict[str, int] = {"device": 0, "host": 0, "nvme": 0}
    in_cpu = 0
    for p in model.parameters:
        piece = _piece(p, engine.ranks)
        size = piece * p.seen_in(compute).itemsize
        where = "device" if engine.param_device == "none" else "host"
        if engine.param_device == "nvme":
            # Pieces of trainable parameters are moved into host memory up to a limit, and small ones are never swapped.
            if p.trainable and in_cpu + piece <= engine.param_max_in_cpu:
                in_cpu += piece
            elif size >= MIN_SWAPPED_BYTES:
                where = "nvme"
        place[where] += size
        if engine.zero_hpz_partition_size > 1:
            place[where] += -(-p.numel // engine.zero_hpz_partition_size) * p.seen_in(compute).itemsize
    account = MemoryAccount(**{name: KindBytes(parameters=count) for name, count in place.items()})
    if engine.param_device == "nvme":
        buffers = engine.param_buffer_count * engine.param_buffer_size * compute.itemsize
        account += MemoryAccount(host=KindBytes(communication=buffers))
    return account


def persistent_parameters(parameters: Sequence[ParameterFacts], engine: DeepSpeedFacts) -> list[ParameterFacts]:
    """The small parameters that stage 3 keeps whole on every rank (``parameter_offload.py``)."""
    found, total = [], 0
    limit = engine.model_persistence_threshold
    for p in parameters:
        if p.numel <= engine.param_persistence_threshold and (limit is None or total + p.numel <= limit):
            found.append(p)
            total += p.numel
    return found


def sub_groups(parameters: Sequence[ParameterFacts], engine: DeepSpeedFacts) -> list[int]:
    """Elements of the pieces that stage 3 steps at a time (``_create_fp16_sub_groups``)."""
    groups: dict[int, list[int]] = defaultdict(list)
    for p in parameters:
        groups[p.group].append(_piece(p, engine.ranks))
    found: list[int] = []
    for pieces in groups.values():
        current = 0
        for index, piece in enumerate(pieces):
            current += piece
            if current >= engine.sub_group_size or index == len(pieces) - 1:
                found.append(current)
                current = 0
    return found


def live_elements(model: ModelFacts, engine: DeepSpeedFacts, persistent: set[str]) -> int:
    """The most elements that are gathered at a time, beside persistent ones."""
    order = tuple(name for name in model.units if name)
    return max(live_by_position(model, engine, persistent, order).values())


def live_by_position(
    model: ModelFacts, engine: DeepSpeedFacts, persistent: set[str], order: Sequence[str]
) -> dict[tuple[str, str], int]:
    """Elements that are gathered while each unit computes, beside persistent ones; by phase and unit.

    Shards that are whole are used as they are, without a copy. Else a unit is freed after use unless it is used again
    within ``max_reuse_distance`` elements; the next ones are gathered ahead, a bucket's worth, as long as no more than
    ``max_live`` are there (``partitioned_param_coordinator.py``). What is in no unit is taken as used at the beginning
    and at the end of forward, in halves of a pass each.
    """
    apart = {p.fqn for p in model.parameters} if engine.forward_uses_shards else persistent
    sizes = {name: sum(p.numel for p in members if p.fqn not in apart) for name, members in model.units.items()}
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
        ahead = min(
            engine.prefetch_bucket_size, max(0, engine.max_live_parameters - count), sum(sizes.values()) - count
        )
        found[phase, unit] = max(found.get((phase, unit), 0), count + ahead)
    return found
