"""Bytes of a rank under ZeRO stage 3, which partitions each parameter.

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
from lightning_shard.planning.step_memory import StepMemory, compute_bytes
from lightning_shard.planning.zero_stages_1_2 import reduction_copies
from lightning_shard.precision.policy import PrecisionPolicy

MIN_SWAPPED_BYTES = 1024**2
"""What is smaller stays in memory under NVMe offload (``swap_tensor/utils.py``, ``MIN_AIO_BYTES``)."""


def stage_3(
    model: ModelFacts, engine: DeepSpeedFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, micro_batches: int
) -> StepMemory:
    """See `lightning_shard.planning.predict.predict`."""
    compute, master, trainable = policy.compute, policy.master, model.trainable
    groups = _sub_groups(trainable, engine)
    on_nvme = engine.optimizer_device == "nvme"
    in_memory = [0 if on_nvme and size * master.itemsize >= MIN_SWAPPED_BYTES else size for size in groups]
    swapped = sum(groups) - sum(in_memory)
    # DeepSpeed means to share masters with parameters of the same dtype, but compares a device with its name.
    state = KindBytes(masters=sum(in_memory) * master.itemsize, optimizer=optimizer.state_bytes(in_memory, master))
    slots = sum((slot or master).itemsize for slot in optimizer.slots)
    files = KindBytes(masters=swapped * master.itemsize, optimizer=swapped * slots)
    # One flat buffer of sums for as long as the run lasts, and under offload the optimizer's own beside it.
    gradients = sum(groups) * engine.accumulate.itemsize
    bucket = engine.reduce_bucket_size * policy.reduce.itemsize if engine.contiguous_gradients else 0
    persistent = persistent_parameters(model.parameters, engine)
    gathered = 0 if engine.forward_uses_shards else compute_bytes(persistent, compute)
    always = _shards(model, engine, compute) + MemoryAccount(
        device=KindBytes(buffers=model.buffer_bytes, communication=bucket, gathered=gathered), nvme=files
    )
    update = 0
    if engine.optimizer_device == "none":
        always += MemoryAccount(device=state + KindBytes(gradients=gradients))
        # Gradients of a sub-group in the masters' dtype.
        update = max(groups, default=0) * master.itemsize
    else:
        buffers = 0
        if on_nvme:
            # One for each tensor of a sub-group that is swapped, and one that new slots are written through.
            needed = len(optimizer.slots) + 2 if swapped else 0
            buffers = max(engine.optimizer_buffer_count, needed) * max(groups, default=0) * master.itemsize
        gradients += sum(in_memory) * master.itemsize
        always += MemoryAccount(host=state + KindBytes(gradients=gradients, communication=buffers))
    order = tuple(name for name in model.units if name)
    at_most = max(gathered_elements(model, engine, order).values()) * compute.itemsize
    newest = max((p.numel for p in trainable), default=0) * compute.itemsize
    # A bucket's gradients are copied together for the reduce-scatter (``reduce_scatter_coalesced``).
    copies, after_backward = reduction_copies(model, engine, policy.reduce.itemsize)
    computing = always + MemoryAccount(device=KindBytes(gathered=at_most))
    return StepMemory(
        forward=computing,
        backward=computing + MemoryAccount(device=KindBytes(gradients=newest, communication=copies)),
        step=always + MemoryAccount(device=KindBytes(communication=update)),
        copies_after_backward=after_backward,
        newest_gradient=newest,
    )


def _shard_elements(parameter: ParameterFacts, ranks: int) -> int:
    return -(-parameter.numel // ranks)


def _shards(model: ModelFacts, engine: DeepSpeedFacts, compute: torch.dtype) -> MemoryAccount:
    """This rank's shards of the parameters, where they are resident, and the buffers of NVMe."""
    sizes = {"device": 0, "host": 0, "nvme": 0}
    in_cpu = 0
    for p in model.parameters:
        shard, itemsize = _shard_elements(p, engine.ranks), p.seen_in(compute).itemsize
        where = "device" if engine.param_device == "none" else "host"
        if engine.param_device == "nvme":
            # Shards of trainable parameters go into host memory up to a limit, and small ones are never swapped.
            if p.trainable and in_cpu + shard <= engine.param_max_in_cpu:
                in_cpu += shard
            elif shard * itemsize >= MIN_SWAPPED_BYTES:
                where = "nvme"
        sizes[where] += shard * itemsize
        if engine.zero_hpz_partition_size > 1:
            sizes[where] += _shard_elements(p, engine.zero_hpz_partition_size) * itemsize
    account = MemoryAccount(**{name: KindBytes(parameters=size) for name, size in sizes.items()})
    if engine.param_device == "nvme":
        buffers = engine.param_buffer_count * engine.param_buffer_size * compute.itemsize
        account += MemoryAccount(host=KindBytes(communication=buffers))
    return account


def persistent_parameters(parameters: Sequence[ParameterFacts], engine: DeepSpeedFacts) -> list[ParameterFacts]:
    """The small parameters that stage 3 keeps gathered on every rank (``parameter_offload.py``)."""
    found, total = [], 0
    limit = engine.model_persistence_threshold
    for p in parameters:
        if p.numel <= engine.param_persistence_threshold and (limit is None or total + p.numel <= limit):
            found.append(p)
            total += p.numel
    return found


def _sub_groups(parameters: Sequence[ParameterFacts], engine: DeepSpeedFacts) -> list[int]:
    """Elements of the sub-groups of shards that are stepped one after the other (``_create_fp16_sub_groups``)."""
    groups: dict[int, list[int]] = defaultdict(list)
    for p in parameters:
        groups[p.group].append(_shard_elements(p, engine.ranks))
    found: list[int] = []
    for shards in groups.values():
        current = 0
        for index, shard in enumerate(shards):
            current += shard
            if current >= engine.sub_group_size or index == len(shards) - 1:
                found.append(current)
                current = 0
    return found


def gathered_elements(model: ModelFacts, engine: DeepSpeedFacts, order: Sequence[str]) -> dict[tuple[str, str], int]:
    """Elements that are gathered while each unit computes, without persistent parameters; by phase and unit.

    A unit is freed after use unless it is used again within ``max_reuse_distance`` elements; the next ones are gathered
    ahead, a bucket's worth, as long as no more than ``max_live_parameters`` are gathered
    (``partitioned_param_coordinator.py``). What is in no unit is taken as used at the beginning and at the end of
    forward and of backward.

    Args:
        model: with its units.
        engine: with its thresholds.
        order: the units in the order in which forward reaches them, without the root's "".
    """
    read_in_place = model.parameters if engine.forward_uses_shards else persistent_parameters(model.parameters, engine)
    excluded = {p.fqn for p in read_in_place}
    sizes = {name: sum(p.numel for p in unit if p.fqn not in excluded) for name, unit in model.units.items()}
    names = ["", *order, ""]
    steps = [("forward", name) for name in names] + [("backward", name) for name in reversed(names)]
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
        room = max(0, engine.max_live_parameters - count)
        ahead = min(engine.prefetch_bucket_size, room, sum(sizes.values()) - count)
        found[phase, unit] = max(found.get((phase, unit), 0), count + ahead)
    return found
