"""Bytes of a rank under FSDP2, and what it sends.

Sources: torch's ``distributed/fsdp/_fully_shard/_fsdp_param.py`` (a shard is padded to the first rank's),
``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` (which buffers live how long).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from lightning_shard.engines.facts import FSDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ParameterFacts, Training
from lightning_shard.planning.memory_trace import Segment, Trace
from lightning_shard.planning.step_memory import START, Point, StepMemory, gradient_elements, with_segment
from lightning_shard.planning.traffic import Collective


def _shard_elements(p: ParameterFacts, shards: int) -> int:
    """Elements of a rank's shard, padding included: along its first dim, or the full parameter if it is not sharded."""
    return p.numel if p.unsharded else -(-p.shape[0] // shards) * prod(p.shape[1:])


def _gathered_bytes(parameters: Iterable[ParameterFacts], shards: int, compute: torch.dtype) -> int:
    """Bytes of a unit's unsharded parameters, each padded to a multiple of the shards, as forward sees them."""
    sharded = (p for p in parameters if not p.unsharded)
    return sum(shards * _shard_elements(p, shards) * p.seen_in(compute).itemsize for p in sharded)


def _reduced_bytes(parameters: Iterable[ParameterFacts], shards: int, dtype: torch.dtype) -> int:
    """Bytes of the buffer that a unit's gradients are reduced from."""
    return sum(shards * _shard_elements(p, shards) * dtype.itemsize for p in parameters if _is_reduced(p))


def _unsharded_gradient_bytes(parameters: Iterable[ParameterFacts], dtype: torch.dtype) -> int:
    return sum(p.numel * dtype.itemsize for p in parameters if _is_reduced(p))


def _kept_of(members: Sequence[ParameterFacts], engine: FSDPFacts) -> tuple[bool, float]:
    """Whether a unit stays gathered after forward, and what part of it does."""
    own = members[0].reshard if members else None
    again = engine.reshard_after_forward if own is None else own
    return again is False, 1 if again is False else 0 if again is True else 1 / again


def _is_reduced(parameter: ParameterFacts) -> bool:
    return parameter.trainable and parameter.dtype.is_floating_point and not parameter.unsharded


def step_memory(training: Training, engine: FSDPFacts) -> StepMemory:
    """See `lightning_shard.planning.predict.predict`.

    In forward a unit's all-gather buffer outlives the copies out of it until the next unit's; in backward one unit is
    gathered ahead, and the buffer that gradients are reduced from outlives the reduction until the next unit's.
    """
    model, policy, shards = training.model, training.policy, engine.shard
    master, compute = policy.master, policy.compute
    elements = [_shard_elements(p, shards) for p in model.trainable]
    gradients = sum(elements) * master.itemsize
    resident = KindBytes(
        parameters=sum(_shard_elements(p, shards) * p.stepped_in(master).itemsize for p in model.parameters),
        optimizer=training.optimizer.state_bytes(elements, master),
        buffers=model.buffer_bytes,
    )
    root, units = model.units[""], [members for name, members in model.units.items() if name]
    of_units = [_gathered_bytes(members, shards, compute) for members in units]
    of_root = _gathered_bytes(root, shards, compute)
    kept = [_kept_of(members, engine) for name, members in model.units.items() if name]
    again = [0 if stays else size for size, (stays, _) in zip(of_units, kept, strict=True)]
    gathered = max(again, default=0) + sum(round(size * part) for size, (_, part) in zip(of_units, kept, strict=True))
    # Bytes of all-gather buffers.
    in_forward = 0 if shards == 1 else max(_of_neighbours(of_units, 2), of_root)
    in_backward = 0 if shards == 1 else _of_neighbours(again, max(1, engine.backward_prefetch))
    reduced = max(_reduced_bytes(members, shards, policy.reduce) for members in [root, *units])
    unreduced = max(
        sum(p.numel * p.seen_in(compute).itemsize for p in members if _is_reduced(p)) for members in [root, *units]
    )
    at_boundary = engine.reduce_at_boundary
    waiting = _unsharded_gradient_bytes(model.parameters, policy.reduce) if at_boundary else gradients
    waiting = waiting if training.micro_batches > 1 else 0
    computing = replace(resident, gathered=of_root + gathered)
    # What waits unsharded stays on the device under offload too, as do parameters that FSDP does not shard.
    unsharded = waiting if at_boundary else 0
    on_device = sum(p.numel * p.stepped_in(master).itemsize for p in model.parameters if p.unsharded)

    def account(kinds: KindBytes, unsharded: int, sharded: int) -> MemoryAccount:
        """With gradients that stay on the device, and those that are offloaded with the shards."""
        if not engine.cpu_offload:
            return MemoryAccount(device=replace(kinds, gradients=unsharded + sharded))
        host = KindBytes(parameters=kinds.parameters - on_device, optimizer=kinds.optimizer, gradients=sharded)
        return MemoryAccount(device=replace(kinds, parameters=on_device, optimizer=0, gradients=unsharded), host=host)

    reduced_so_far = gradients if engine.cpu_offload else max(gradients, waiting) - unsharded
    return StepMemory(
        # The strategy drops the last step's gradients ahead of forward.
        forward=account(replace(computing, communication=in_forward), unsharded, waiting - unsharded),
        backward=account(
            replace(computing, communication=in_backward + reduced), unreduced + unsharded, reduced_so_far
        ),
        step=account(resident, 0, gradients),
        waiting=waiting,
    )


def _of_neighbours(values: Sequence[int], count: int) -> int:
    """The largest sum of ``count`` values that follow one another."""
    return max((sum(values[i : i + count]) for i in range(max(1, len(values) - count + 1))), default=0)


def start_of_fit(training: Training, engine: FSDPFacts) -> Point:
    """Units are sharded one by one: a rank has its shards and one full unit (`lightning_shard.engines.fsdp2`)."""
    resident = step_memory(training, engine).step
    full = max(sum(p.numel * p.dtype.itemsize for p in members) for members in training.model.units.values())
    kinds = KindBytes(parameters=resident.device.parameters, buffers=resident.device.buffers, gathered=full)
    host = KindBytes(parameters=resident.host.parameters)
    return Point(name=START, account=MemoryAccount(device=kinds, host=host))


def padding(training: Training, engine: FSDPFacts) -> tuple[int, int, int]:
    """Bytes of all units gathered, the same without padding, and the most shards with which it is at most a tenth.

    A parameter is sharded along dim 0 into as many chunks as there are shards, all as large as the first: buffers have
    at least one row for each shard (``FSDPParam._init_sharded_param``, ``_get_dim0_padded_size``).
    """

    def gathered(shards: int) -> int:
        return _gathered_bytes(training.model.parameters, shards, training.policy.compute)

    divisors = [s for s in range(1, engine.shard + 1) if engine.shard % s == 0]
    fewer = max(s for s in divisors if gathered(s) <= 1.1 * gathered(1))
    return gathered(engine.shard), gathered(1), fewer


def step_points(training: Training, engine: FSDPFacts, memory: StepMemory, trace: Trace) -> Iterator[Point]:
    steps = _TracedUnits(training, engine, memory, trace)
    if training.micro_batches > 2 and engine.reduce_at_boundary:
        # Micro-batches between the first and the last, after which no gradient is freed.
        yield from steps.points(reduces=False)
    yield from steps.points(reduces=True)


class _TracedUnits:
    """Units are gathered, freed and reduced one after the other, in the order of the trace. Numbers are bytes."""

    def __init__(self, training: Training, engine: FSDPFacts, memory: StepMemory, trace: Trace) -> None:
        shards, units, policy = engine.shard, training.model.units, training.policy
        self.engine, self.memory, self.trace, self.policy = engine, memory, trace, policy
        self.unsharded = {name: _gathered_bytes(members, shards, policy.compute) for name, members in units.items()}
        self.reduced = {name: _reduced_bytes(members, shards, policy.reduce) for name, members in units.items()}
        self.waiting = {name: _unsharded_gradient_bytes(members, policy.reduce) for name, members in units.items()}
        kept = {name: _kept_of(members, engine) for name, members in units.items()}
        self.kept = {name: round(self.unsharded[name] * part) for name, (_, part) in kept.items()}
        # What is gathered again in backward.
        self.again = {name: 0 if stays else self.unsharded[name] for name, (stays, _) in kept.items()}
        self.elements = gradient_elements(training.model, lambda p: _shard_elements(p, shards))
        self.before = {name: trace.order[i - 1] for i, name in enumerate(trace.order) if i}
        step = memory.step
        self.base = MemoryAccount(device=replace(step.device, gradients=0), host=replace(step.host, gradients=0))

    def points(self, *, reduces: bool) -> Iterator[Point]:
        """In the order of the step; ``reduces``: gradients are reduced, and not added to unsharded ones that wait."""
        done: tuple[str, ...] = ()
        passed: dict[str, None] = {}
        last_reduced = before = 0
        for segment in self.trace.segments:
            backward = segment.phase == "backward"
            gathered = self._gathered(segment.unit, [name for name in passed if name not in done], done)
            in_flight = self._all_gather_buffers(segment, next(reversed(passed), ""))
            reducing = last_reduced * backward
            base = self.base + self._gradients(done if reduces else ())
            if segment.unit and segment.unit not in done and self.engine.shard > 1:
                yield self._gathering(segment, base, gathered, before, reducing)
            before = segment.end_activations + segment.end_gradients
            account = with_segment(
                base, segment, gradients=segment.peak_gradients, gathered=gathered, communication=in_flight + reducing
            )
            yield Point(name=segment.name, account=account, apart=self._apart(base, in_flight))
            for name in [name for name in segment.complete if name not in done and reduces]:
                yield self._reduction(name, segment, base, gathered, in_flight)
                last_reduced = self.reduced[name]
            done = segment.complete or done
            if not backward and segment.unit:
                passed[segment.unit] = None

    def _gathered(self, unit: str, passed: Sequence[str], done: Sequence[str]) -> int:
        """Of the root, of the unit that computes, and of those that stay gathered, all or a part of them."""
        others = sum(self.kept.get(name, 0) for name in passed if name != unit)
        own = self.unsharded.get(unit, 0) if unit and unit not in done else 0
        return self.unsharded[""] + own + others

    def _all_gather_buffers(self, segment: Segment, last: str) -> int:
        """In forward the unit's own buffer or the last one's, in backward the next one's."""
        if self.engine.shard == 1:
            return 0
        if segment.phase == "forward":
            return self.unsharded.get(segment.unit or last, 0)
        return self.again.get(self.before.get(segment.unit, "-"), 0)

    def _gradients(self, done: Sequence[str]) -> MemoryAccount:
        """Reduced gradients, summed over micro-batches, and unsharded ones that wait on the device."""
        reduced = sum(self.elements[name] for name in done) * self.policy.master.itemsize
        unsharded = 0
        if self.engine.reduce_at_boundary and self.memory.waiting:
            unsharded = sum(size for name, size in self.waiting.items() if name not in done)
        else:
            reduced = max(reduced, self.memory.waiting)
        if self.engine.cpu_offload:
            return MemoryAccount(device=KindBytes(gradients=unsharded), host=KindBytes(gradients=reduced))
        return MemoryAccount(device=KindBytes(gradients=unsharded + reduced))

    def _gathering(self, segment: Segment, base: MemoryAccount, gathered: int, before: int, reducing: int) -> Point:
        """The unit is copied out of its all-gather buffer; ``before``: what the step had made until then."""
        buffer = (self.again if segment.phase == "backward" else self.unsharded).get(segment.unit, 0)
        start = replace(segment, peak=before, peak_gradients=0)
        account = with_segment(base, start, gradients=0, gathered=gathered, communication=buffer + reducing)
        name = f"{segment.phase} of {segment.unit}, gathering"
        return Point(name=name, account=account, apart=self._apart(base, buffer))

    def _apart(self, base: MemoryAccount, all_gather: int, reduced: int = 0) -> KindBytes:
        """Buffers of all-gathers and what reduce-scatters give have streams of their own (``FSDPCommContext``)."""
        summed = 0 if self.engine.reduce_at_boundary and self.memory.waiting else base.device.gradients
        return KindBytes(communication=all_gather, gradients=summed + reduced)

    def _reduction(self, name: str, segment: Segment, base: MemoryAccount, gathered: int, in_flight: int) -> Point:
        """The unit is resharded, then its gradients are copied into the buffer that they are reduced from."""
        end = replace(segment, peak=segment.at_reduction or segment.end_activations, peak_gradients=0)
        reduced = self.elements[name] * self.policy.reduce.itemsize
        account = with_segment(
            base,
            end,
            gradients=reduced,
            gathered=gathered - (self.unsharded[name] if name and name == segment.unit else 0),
            communication=in_flight + self.reduced[name],
        )
        apart = self._apart(base, in_flight, reduced)
        return Point(name=f"reduction of {name or 'the root'}", account=account, apart=apart)


def collectives(training: Training, engine: FSDPFacts) -> list[Collective]:
    shards, policy, micro_batches = engine.shard, training.policy, training.micro_batches
    units = {name: _gathered_bytes(members, shards, policy.compute) for name, members in training.model.units.items()}
    gathered = sum(units.values()) * micro_batches
    reduced = sum(_reduced_bytes(members, shards, policy.reduce) for members in training.model.units.values())
    reduced *= 1 if engine.reduce_at_boundary else micro_batches
    forward = Collective(kind="all-gather", what="parameters, forward", axis="shard", ranks=shards, payload=gathered)
    found = [forward, replace(forward, kind="reduce-scatter", what="gradients", payload=reduced)]
    below: dict[int, int] = {}
    for name, members in training.model.units.items():
        stays, part = _kept_of(members, engine)
        # The root stays gathered from forward to backward.
        if name and not stays:
            ranks = round(1 / part) if part else shards
            below[ranks] = below.get(ranks, 0) + units[name] * micro_batches
    found[1:1] = [replace(forward, what="parameters, backward", ranks=r, payload=sent) for r, sent in below.items()]
    if engine.replicate > 1:
        copies = replace(forward, kind="all-reduce", what="gradient shards", axis="replicate", ranks=engine.replicate)
        found.append(replace(copies, payload=reduced // shards, stride=shards))
    return found
