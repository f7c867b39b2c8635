"""Compute the memory and traffic of a rank under FSDP2.

Sources: torch's ``distributed/fsdp/_fully_shard/_fsdp_param.py`` (shards are padded to the first rank's size),
``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` (lifetimes of buffers).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from lightning_shard.engines.memory_model import EngineFacts, FSDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning import ddp_memory
from lightning_shard.planning.memory_trace import Segment, Trace
from lightning_shard.planning.model_facts import ParameterFacts, Training
from lightning_shard.planning.step_memory import START, Point, StepMemory, gradient_elements
from lightning_shard.planning.traffic import Collective
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.text import show_bytes


def _shard_elements(p: ParameterFacts, shards: int) -> int:
    """Elements of a rank's shard along dim 0 with padding, or of the full parameter if it is not sharded."""
    return p.numel if p.unsharded else -(-p.shape[0] // shards) * prod(p.shape[1:])


def _gathered_bytes(parameters: Iterable[ParameterFacts], shards: int, compute: torch.dtype) -> int:
    """Bytes of a unit's gathered parameters in their compute dtype, each padded to a multiple of the shards."""
    sharded = (p for p in parameters if not p.unsharded)
    return sum(shards * _shard_elements(p, shards) * p.seen_in(compute).itemsize for p in sharded)


def _reduced_bytes(parameters: Iterable[ParameterFacts], shards: int, dtype: torch.dtype) -> int:
    """Bytes of the buffer from which a unit's gradients are reduced. With one shard: of its unsharded gradients."""
    reduced = (p for p in parameters if p.trainable and p.dtype.is_floating_point and not p.unsharded)
    return sum(shards * _shard_elements(p, shards) * dtype.itemsize for p in reduced)


def _cast_bytes(parameters: Iterable[ParameterFacts], policy: PrecisionPolicy) -> int:
    """Peak bytes of casts, in addition to a unit that is gathered from one shard. Each parameter is cast and copied.
    Its cast lives until the next one is made (``FSDPParamGroup.wait_for_unshard``).
    """
    copied = last = most = 0
    for p in (p for p in parameters if not p.unsharded):
        size = p.numel * p.seen_in(policy.compute).itemsize
        cast = size if p.seen_in(policy.compute) != p.stepped_in(policy.master) else 0
        most = max(most, copied + cast + max(last, size))
        copied, last = copied + size, cast
    return most - copied


def _kept_of(members: Sequence[ParameterFacts], engine: FSDPFacts) -> tuple[bool, float]:
    """Whether a unit stays gathered after forward, and the share of it that does."""
    own = members[0].reshard if members else None
    again = engine.reshard_after_forward if own is None else own
    return again is False, 1 if again is False else 0 if again is True else 1 / again


def step_memory(training: Training, engine: FSDPFacts) -> StepMemory:
    model, policy, shards = training.model, training.policy, engine.shard
    master = policy.master
    gradients = sum(_shard_elements(p, shards) for p in model.trainable) * master.itemsize
    # Parameters that FSDP leaves full stay on the device under offload too.
    unsharded = sum(p.numel * p.stepped_in(master).itemsize for p in model.parameters if p.unsharded)
    kinds = KindBytes(
        parameters=sum(_shard_elements(p, shards) * p.stepped_in(master).itemsize for p in model.parameters),
        optimizer=training.optimizer.state_bytes(
            [_shard_elements(p, shards) for p in model.stepped_parameters], master
        ),
        gradients=gradients,
    )
    account = MemoryAccount(device=replace(kinds, buffers=model.buffer_bytes))
    if engine.cpu_offload:
        host = replace(kinds, parameters=kinds.parameters - unsharded)
        account = MemoryAccount(device=KindBytes(parameters=unsharded, buffers=model.buffer_bytes), host=host)
    waiting = gradients
    if engine.reduce_at_boundary:
        waiting = _reduced_bytes(model.parameters, 1, policy.reduce)
    return StepMemory(step=account, waiting=waiting if training.micro_batches > 1 else 0)


def start_of_fit(training: Training, engine: FSDPFacts) -> list[Point]:
    """Memory while units are sharded one by one: all shards and one full unit (`lightning_shard.engines.sharding`)."""
    resident = step_memory(training, engine).step
    full = max(sum(p.numel * p.dtype.itemsize for p in members) for members in training.model.units.values())
    kinds = KindBytes(parameters=resident.device.parameters, buffers=resident.device.buffers, gathered=full)
    host = KindBytes(parameters=resident.host.parameters)
    return [Point(name=START, account=MemoryAccount(device=kinds, host=host))]


def padding_note(training: Training, engine: EngineFacts) -> str:
    """The cost of FSDP2's padding and a mesh that avoids it, or "" if it is less than a tenth. Dim 0 is split into one
    chunk for each rank, all as large as the first (``FSDPParam._init_sharded_param``).
    """
    if not isinstance(engine, FSDPFacts):
        return ""
    divisors = [shards for shards in range(1, engine.shard + 1) if engine.shard % shards == 0]
    gathered = {s: _gathered_bytes(training.model.parameters, s, training.policy.compute) for s in divisors}
    fewer = max(shards for shards in divisors if gathered[shards] <= 1.1 * gathered[1])
    told = (
        f"FSDP2 pads dim 0 of each parameter to a multiple of its {engine.shard:,} shards: gathered, all units "
        f"take {show_bytes(gathered[engine.shard])} in place of {show_bytes(gathered[1])}. Shard over fewer ranks and "
        f"replicate: mesh: {{replicate: {engine.ranks // fewer}, shard: {fewer}}}"
    )
    return told if fewer < engine.shard else ""


def step_points(training: Training, engine: FSDPFacts, memory: StepMemory, trace: Trace) -> Iterator[Point]:
    """See `predict.step_points`. In forward a unit's all-gather buffer lives until the next unit's is allocated. In
    backward one unit is gathered ahead, and a reduction's buffer lives until the next unit's is allocated.
    """
    steps = _TracedUnits(training, engine, memory, trace)
    if training.micro_batches > 2 and engine.reduce_at_boundary:
        # Micro-batches between the first and the last free no gradients.
        yield from steps.points(reduces=False)
    yield from steps.points(reduces=True)


class _TracedUnits:
    """Gathers, frees and reduces units one by one in the order of the trace. Numbers are bytes."""

    def __init__(self, training: Training, engine: FSDPFacts, memory: StepMemory, trace: Trace) -> None:
        shards, units, policy = engine.shard, training.model.units, training.policy
        self.engine, self.memory, self.trace, self.policy, self.manual = engine, memory, trace, policy, training.manual
        self.unsharded = {name: _gathered_bytes(members, shards, policy.compute) for name, members in units.items()}
        self.reduced = {name: _reduced_bytes(members, shards, policy.reduce) for name, members in units.items()}
        self.waiting = {name: _reduced_bytes(members, 1, policy.reduce) for name, members in units.items()}
        kept = {name: _kept_of(members, engine) for name, members in units.items()}
        self.kept = {name: round(self.unsharded[name] * part) for name, (_, part) in kept.items()}
        # Bytes that backward gathers again.
        self.again = {name: 0 if stays else self.unsharded[name] for name, (stays, _) in kept.items()}
        self.elements = gradient_elements(training.model, lambda p: _shard_elements(p, shards))
        self.casts = {name: _cast_bytes(members, policy) for name, members in units.items()}
        self.before = {name: trace.order[i - 1] for i, name in enumerate(trace.order) if i}
        undropped = sum(_shard_elements(p, shards) for p in training.model.outside) * policy.master.itemsize
        device, host = (0, undropped) if engine.cpu_offload else (undropped, 0)
        own = memory.step
        self.base = MemoryAccount(device=replace(own.device, gradients=device), host=replace(own.host, gradients=host))

    def points(self, *, reduces: bool) -> Iterator[Point]:
        """Points in the order of the step. ``reduces``: gradients are reduced, not added to unsharded ones."""
        done: tuple[str, ...] = ()
        passed: dict[str, None] = {}
        last_reduced = before = 0
        for segment in self.trace.segments:
            unit, backward, made = segment.unit, segment.phase == "backward", segment.peak_gradients
            base = self.base + self._gradients(done if reduces else ())
            computes = bool(unit) and unit not in done
            others = sum(self.kept.get(name, 0) for name in passed if name not in done and name != unit)
            full = self.unsharded[""] + others + (self.unsharded.get(unit, 0) if computes else 0)
            last = next(reversed(passed), "")
            in_flight = self._all_gather_buffers(segment, last, done)
            reducing = last_reduced * backward
            if computes:
                # The unit is copied out of its all-gather buffer, or with a single shard out of casts.
                own = (self.again if backward else self.unsharded).get(unit, 0)
                buffers = own
                if not backward and unit != last:
                    # Forward keeps the last unit's buffer until then (``FSDPParamGroup.wait_for_unshard``).
                    buffers += self.unsharded[last]
                if self.engine.shard == 1:
                    buffers = 0
                cast = buffers or (self.casts[unit] if own else 0)
                kinds = KindBytes(gathered=full, activations=before, communication=cast + reducing)
                yield self._point(f"{segment.phase} of {unit}, gathering", base, kinds, buffers)
            before = segment.end_activations + segment.end_gradients
            kinds = KindBytes(gathered=full, activations=segment.peak - made, communication=in_flight + reducing)
            yield self._point(segment.name, base, replace(kinds, gradients=made), in_flight)
            for name in [name for name in segment.complete if name not in done and reduces]:
                # The unit is resharded, then its gradients are copied into the reduction's buffer.
                rest = full - (self.unsharded[name] if name and name == unit else 0)
                activations, last_reduced = segment.at_reduction or segment.end_activations, self.reduced[name]
                kinds = KindBytes(gathered=rest, activations=activations, communication=in_flight + last_reduced)
                reduced = self.elements[name] * self.policy.reduce.itemsize
                yield self._point(f"reduction of {name or 'the root'}", base, kinds, in_flight, reduced)
            done = segment.complete or done
            if not backward and unit:
                passed[unit] = None

    def _point(self, name: str, base: MemoryAccount, kinds: KindBytes, all_gather: int, reduced: int = 0) -> Point:
        """A point with ``base``, the device's ``kinds`` and ``reduced`` gradients."""
        account = base + MemoryAccount(device=kinds + KindBytes(gradients=reduced))
        # Buffers of all-gathers and outputs of reduce-scatters have streams of their own (``FSDPCommContext``).
        summed = 0 if self.engine.reduce_at_boundary and self.memory.waiting else base.device.gradients
        own_stream = KindBytes(communication=all_gather, gradients=summed + reduced)
        return Point(name=name, account=account, own_stream=own_stream)

    def _all_gather_buffers(self, segment: Segment, last: str, done: Sequence[str]) -> int:
        """In forward the unit's own buffer or the last unit's. In backward the next unit's, which the root starts."""
        if self.engine.shard == 1:
            return 0
        if segment.phase == "forward":
            return self.unsharded.get(segment.unit or last, 0)
        left = [name for name in self.trace.order if name not in done]
        # In manual optimization backward runs inside of the root's forward, before the root has a backward hook.
        first = left[-1] if left and self.unsharded[""] and not self.manual else "-"
        return self.again.get(self.before.get(segment.unit, "-") if segment.unit else first, 0)

    def _gradients(self, done: Sequence[str]) -> MemoryAccount:
        """Reduced gradients, summed over micro-batches, and unsharded ones on the device that are not reduced yet."""
        reduced = sum(self.elements[name] for name in done) * self.policy.master.itemsize
        unsharded = 0
        if self.engine.reduce_at_boundary and self.memory.waiting:
            unsharded = sum(size for name, size in self.waiting.items() if name not in done)
        else:
            reduced = max(reduced, self.memory.waiting)
        if self.engine.cpu_offload:
            return MemoryAccount(device=KindBytes(gradients=unsharded), host=KindBytes(gradients=reduced))
        return MemoryAccount(device=KindBytes(gradients=unsharded + reduced))


def collectives(training: Training, engine: FSDPFacts) -> list[Collective]:
    if engine.shard == 1:
        return ddp_memory.collectives(training, engine)
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
