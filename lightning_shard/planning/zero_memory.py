"""Compute the memory and traffic of a rank under DeepSpeed's ZeRO. Stages 1 and 2 partition a flat copy of parameters.

Sources in DeepSpeed 0.19.8: ``runtime/zero/stage_1_and_2.py``, ``runtime/bf16_optimizer.py`` (stage 1 with bf16
parameters and fp32 sums), and for stage 3 the files that are named below.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from lightning_shard.engines.memory_model import DeepSpeedFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.model_facts import ModelFacts, ParameterFacts, Training
from lightning_shard.planning.step_memory import START, Point, ZeroMemory, compute_bytes, gradient_elements, on_device
from lightning_shard.planning.traffic import Collective


def _stepped(training: Training) -> Training:
    """``training`` as DeepSpeed sees it: parameters in no optimizer are frozen."""
    parameters = tuple(replace(p, trainable=p.trainable and p.group is not None) for p in training.model.parameters)
    return replace(training, model=replace(training.model, parameters=parameters))


def step_memory(training: Training, engine: DeepSpeedFacts) -> ZeroMemory:
    # Full gradients of parameters in no optimizer stay, because nothing drops them.
    kept = compute_bytes(training.model.outside, training.policy.compute)
    gradients, training = MemoryAccount(device=KindBytes(gradients=kept)), _stepped(training)
    memory = (stages_1_2 if engine.stage < 3 else stage_3)(training, engine)
    if training.optimizer.share < 1:
        # Several optimizers take the gradients from DeepSpeed, whose own step does nothing (`engines.zero.stepping`).
        places = {name: getattr(memory.forward, name).masters for name in ("device", "host")}
        taken = MemoryAccount(**{name: KindBytes(gradients=size) for name, size in places.items()})
        memory = replace(memory, step=memory.forward + taken, left_in_step=0)
    # The host keeps this rank's slices of frozen parameters that casting rounded, for checkpoints.
    compute, frozen = training.policy.compute, [p for p in training.model.parameters if not p.trainable]
    rounded = [p for p in frozen if p.dtype.is_floating_point and torch.promote_types(p.dtype, compute) != compute]
    copies = sum(_shard_elements(p, engine.ranks) * p.dtype.itemsize for p in rounded)
    other = gradients + MemoryAccount(host=KindBytes(masters=copies))
    return replace(memory, forward=memory.forward + other, backward=memory.backward + other, step=memory.step + other)


def start_of_fit(training: Training, engine: DeepSpeedFacts) -> list[Point]:
    """Below stage 3 the full module moves to the device in its loaded dtypes (`engines.torch_ddp.prepare_replica`)
    before it is cast. Empty if a step holds at least as much.
    """
    model = training.model
    cast = compute_bytes(model.parameters, training.policy.compute)
    loaded = sum(p.numel * p.dtype.itemsize for p in model.parameters)
    kinds = KindBytes(parameters=cast, gathered=loaded - cast, buffers=model.buffer_bytes)
    return [] if engine.stage == 3 or loaded <= cast else [Point(name=START, account=MemoryAccount(device=kinds))]


def step_points(training: Training, engine: DeepSpeedFacts, memory: ZeroMemory, trace: Trace) -> Iterator[Point]:
    """See `predict.step_points`. DeepSpeed takes gradients one by one and keeps some during backward."""
    elements = gradient_elements(training.model, lambda p: p.numel)
    total = max(1, sum(elements.values()))
    gathered = gathered_elements(training.model, engine, trace.order) if engine.stage == 3 else {}
    forward, backward = memory.forward, memory.backward
    before, after = forward.device.gradients, backward.device.gradients
    always_gathered = memory.step.device.gathered
    done: tuple[str, ...] = ()
    for segment in trace.segments:
        # Buckets are allocated with the first gradient.
        base, gradients = backward if segment.has_gradients else forward, before
        # Without a trace, the newest of backward's gradients is the only activation.
        activations = segment.activations or memory.newest_gradient * segment.has_gradients
        if segment.has_gradients and engine.stage == 1:
            gradients += int((after - before) * sum(elements[name] for name in done) / total)
        elif segment.has_gradients:
            # Stage 2 allocates its partition when the first bucket is full, stage 3 for the whole run.
            reached = sum(elements[name] for name in {*done, segment.unit})
            gradients += (after - before) * (reached > engine.reduce_bucket_size)
        if engine.stage == 1 and not memory.waiting:
            # Gradients stay as backward made them, also in units that still lack some.
            activations, gradients = segment.peak - segment.peak_gradients, gradients + segment.peak_gradients
        # Stage 3 gathers on a stream of its own (``partitioned_param_coordinator.py``, ``__allgather_stream``).
        full = gathered.get((segment.phase, segment.unit), 0) * training.policy.compute.itemsize
        device = replace(base.device, activations=activations, gradients=gradients, gathered=always_gathered + full)
        yield Point(name=segment.name, account=replace(base, device=device), own_stream=KindBytes(gathered=full))
        done = segment.complete or done
    end = replace(
        backward.device,
        gathered=always_gathered,
        gradients=after - memory.freed_in_reduction,
        communication=backward.device.communication + memory.copies_after_backward,
        activations=trace.segments[-1].end_activations,
    )
    yield Point(name="end of backward", account=replace(backward, device=end))
    # Stage 3 ends its step with both new and old persistent parameters (``stage3.py``, ``_post_step``).
    left = replace(forward.device, gathered=2 * always_gathered, activations=end.activations)
    yield Point(name="end of the step", account=replace(forward, device=left))


def collectives(training: Training, engine: DeepSpeedFacts) -> list[Collective]:
    model, compute, micro_batches = _stepped(training).model, training.policy.compute, training.micro_batches

    def sent(kind: str, what: str, payload: int) -> Collective:
        return Collective(kind=kind, what=what, ranks=engine.ranks, payload=payload)

    numel = sum(p.numel for p in model.trainable)
    gradients = numel * training.policy.reduce.itemsize * (micro_batches if engine.stage >= 2 else 1)
    if engine.stage < 3:
        # Buckets are all-reduced, and each rank keeps its part (``use_multi_rank_bucket_allreduce``, the default).
        updated = sent("all-gather", "updated parameters", numel * compute.itemsize)
        return [sent("all-reduce", "gradients", gradients), updated]
    persistent = persistent_parameters(model.parameters, engine)
    names = {p.fqn for p in persistent}
    gathered = compute_bytes((p for p in model.parameters if p.fqn not in names), compute) * micro_batches
    again = sent("all-gather", "parameters, backward", gathered)
    if engine.zero_hpz_partition_size > 1:
        again = replace(again, axis="hpZ", ranks=engine.zero_hpz_partition_size)
    return [
        sent("all-gather", "parameters, forward", gathered),
        again,
        sent("reduce-scatter", "gradients", gradients),
        sent("all-gather", "persistent parameters", sum(p.numel for p in persistent) * compute.itemsize),
    ]


MIN_SWAPPED_BYTES = 1024**2  # NVMe offload keeps smaller tensors in memory (``swap_tensor/utils.py``, MIN_AIO_BYTES).


def stage_3(training: Training, engine: DeepSpeedFacts) -> ZeroMemory:
    model, policy, optimizer = training.model, training.policy, training.optimizer
    compute, master, trainable = policy.compute, policy.master, model.trainable
    groups = _sub_groups(trainable, engine)
    on_nvme = engine.optimizer_device == "nvme"
    in_memory = [0 if on_nvme and size * master.itemsize >= MIN_SWAPPED_BYTES else size for size in groups]
    swapped = sum(groups) - sum(in_memory)
    # DeepSpeed intends to share masters with parameters of the same dtype, but compares a device with its name.
    state = KindBytes(masters=sum(in_memory) * master.itemsize, optimizer=optimizer.state_bytes(in_memory, master))
    slots = sum((slot or master).itemsize for slot in optimizer.slots)
    files = KindBytes(masters=swapped * master.itemsize, optimizer=swapped * slots)
    # One flat buffer of sums during the whole run. Offload adds the optimizer's own gradients.
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
        # One sub-group's gradients in the masters' dtype.
        update = max(groups, default=0) * master.itemsize
    else:
        buffers = 0
        if on_nvme:
            # One buffer for each tensor of a swapped sub-group, and one through which new slots are written.
            needed = len(optimizer.slots) + 2 if swapped else 0
            buffers = max(engine.optimizer_buffer_count, needed) * max(groups, default=0) * master.itemsize
        gradients += sum(in_memory) * master.itemsize
        always += MemoryAccount(host=state + KindBytes(gradients=gradients, communication=buffers))
    # A bucket's gradients are copied together for the reduce-scatter (``reduce_scatter_coalesced``).
    copies, after_backward = reduction_copies(model, engine, policy.reduce.itemsize)
    return ZeroMemory(
        forward=always,
        backward=always + MemoryAccount(device=KindBytes(communication=copies - after_backward)),
        step=always + MemoryAccount(device=KindBytes(communication=update)),
        copies_after_backward=after_backward,
        newest_gradient=max((p.numel for p in trainable), default=0) * compute.itemsize,
    )


def _shard_elements(parameter: ParameterFacts, ranks: int) -> int:
    return -(-parameter.numel // ranks)


def _shards(model: ModelFacts, engine: DeepSpeedFacts, compute: torch.dtype) -> MemoryAccount:
    """This rank's parameter shards by memory, and the buffers of NVMe."""
    sizes = {"device": 0, "host": 0, "nvme": 0}
    in_cpu = 0
    for p in model.parameters:
        shard, itemsize = _shard_elements(p, engine.ranks), p.seen_in(compute).itemsize
        where = "device" if engine.param_device == "none" else "host"
        if engine.param_device == "nvme":
            # Shards of trainable parameters fill host memory up to a limit. Small ones are never swapped.
            if p.trainable and in_cpu + shard <= engine.param_max_in_cpu:
                in_cpu += shard
            elif shard * itemsize >= MIN_SWAPPED_BYTES:
                where = "nvme"
        sizes[where] += shard * itemsize
        if engine.zero_hpz_partition_size > 1:
            sizes[where] += shard * engine.ranks // engine.zero_hpz_partition_size * itemsize
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
    """Elements of the sub-groups of shards, which are stepped one by one (``_create_fp16_sub_groups``)."""
    found: list[int] = []
    for members in _by_group(parameters):
        found.append(0)
        for p in members:
            if found[-1] >= engine.sub_group_size:
                found.append(0)
            found[-1] += _shard_elements(p, engine.ranks)
    return found


def _by_group(parameters: Sequence[ParameterFacts]) -> list[list[ParameterFacts]]:
    groups = dict.fromkeys(p.group or 0 for p in parameters)
    return [[p for p in parameters if (p.group or 0) == group] for group in groups]


def gathered_elements(model: ModelFacts, engine: DeepSpeedFacts, order: Sequence[str]) -> dict[tuple[str, str], int]:
    """Elements that are gathered while each unit computes, by phase and unit, without persistent parameters.

    A unit is freed after use unless it is used again within ``max_reuse_distance`` elements. Up to a bucket of elements
    is gathered ahead, within ``max_live_parameters`` (``partitioned_param_coordinator.py``). ``order`` lists the units
    as forward reaches them. Parameters outside of units are used at both ends.
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


def stages_1_2(training: Training, engine: DeepSpeedFacts) -> ZeroMemory:
    """See `predict.step_memory`. Masters and optimizer state are one flat partition for each parameter group."""
    model, policy, stage_1 = training.model, training.policy, engine.stage == 1
    compute, master, sums = policy.compute, policy.master, engine.accumulate
    # Elements of a rank's partition of each group, padded to twice the ranks, and the most that overlap a partition.
    groups = [[p.numel for p in members] for members in _by_group(model.trainable)]
    partitions = [-(-sum(sizes) // (2 * engine.ranks)) * 2 for sizes in groups]
    flat, overlapping = sum(partitions), sum(map(_most_overlapping, groups, partitions))
    frozen = compute_bytes((p for p in model.parameters if not p.trainable), compute)
    device = KindBytes(parameters=flat * engine.ranks * compute.itemsize + frozen, buffers=model.buffer_bytes)
    state = KindBytes(masters=flat * master.itemsize, optimizer=training.optimizer.state_bytes(partitions, master))
    offload = engine.optimizer_device != "none"
    if stage_1 and not offload and compute == torch.bfloat16 and sums == torch.float32:
        return _bf16_optimizer(device + state, flat * engine.ranks, training)
    numel = [p.numel for p in model.trainable]
    full, largest = sum(numel) * sums.itemsize, max(numel, default=0) * compute.itemsize
    # Gradients of 16-bit parameters are summed in a flat fp32 partition. Otherwise each parameter that overlaps this
    # rank's partition keeps its full gradient.
    in_partition = compute != sums and sums == torch.float32
    own = flat * sums.itemsize if in_partition else overlapping * compute.itemsize
    buckets, copies, copies_after = _reduction(training, engine)
    summed = (full if stage_1 else own) if training.micro_batches > 1 else 0
    # Stage 1 allocates its buckets in the first micro-batch, and frees them at the accumulation boundary.
    waiting = summed if stage_1 else 0
    if offload:
        # Masters, state and gradients are on the host. Gradients pass through the device when they are reduced.
        late, kept, passing, update = 0, own * in_partition, largest, 0
        summed_here = overlapping * master.itemsize if summed and not in_partition else 0
        staging = flat * compute.itemsize + passing + summed_here
        host = state + KindBytes(gradients=flat * master.itemsize, communication=staging)
    else:
        device, host, kept, passing = device + state, KindBytes(), own, 0
        # The optimizer steps with a flat copy, unless gradients are summed in a flat partition of the masters' dtype.
        update = 0 if in_partition and sums == master else flat * master.itemsize
        # Stage 2 allocates the gradients of its partition's parameters after the bucket's copies are freed.
        late = 0 if in_partition or summed else min(own, copies)
    # At the peak of stage 1's reduction the gradients in the first bucket are freed. This rank's own gradients are a
    # flat partition, allocated while the bucket's copies exist, or full gradients after the copies are freed.
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


def _most_overlapping(sizes: Sequence[int], partition: int) -> int:
    """The most elements of parameters that overlap one partition."""
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    most = 0
    # A partition without a parameter's start or end lies inside one parameter.
    for edge in {*starts, *(end - 1 for end in ends)} if partition else ():
        low = max(0, edge) // partition * partition
        first, last = bisect_right(ends, low), bisect_left(starts, low + partition)
        most = max(most, ends[last - 1] - starts[first] if first < last else 0)
    return most


def _bf16_optimizer(always: KindBytes, flat: int, training: Training) -> ZeroMemory:
    """``BF16_Optimizer`` keeps one fp32 buffer of all gradients. Backward's own are zeroed, not freed."""
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
    """Bytes of the buckets, of the copies in the reduction of one bucket, and of the copies made after backward."""
    stage_1, reduce = engine.stage == 1, training.policy.reduce
    dtype = engine.accumulate if stage_1 else training.policy.compute
    converted = reduce.itemsize if reduce != dtype else 0
    copies, after_backward = reduction_copies(training.model, engine, dtype.itemsize + converted)
    has_buckets = engine.contiguous_gradients or engine.optimizer_device != "none"
    buckets = engine.reduce_bucket_size * dtype.itemsize * (2 if engine.overlap_comm else 1) if has_buckets else 0
    # Stage 1 reduces at the accumulation boundary, after backward.
    return buckets, copies, copies if stage_1 else after_backward


def reduction_copies(model: ModelFacts, engine: DeepSpeedFacts, per_element: int) -> tuple[int, int]:
    """Bytes of the copies in the reduction of a bucket, and of those after backward, if all gradients fit into one."""
    numel = sum(p.numel for p in model.trainable)
    copies = min(numel, engine.reduce_bucket_size) * per_element
    return copies, copies if numel <= engine.reduce_bucket_size else 0
