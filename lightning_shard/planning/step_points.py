"""What one rank holds at each part of a traced step: the engine's bytes by arithmetic, the trace's activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_shard.engines.facts import DeepSpeedFacts, EngineFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.fully_shard import as_shards, gathered_bytes, raw_bytes, reduced_bytes, shard_elements
from lightning_shard.planning.live_bytes import Segment
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.predict import predict
from lightning_shard.planning.step_memory import Moments
from lightning_shard.planning.zero_stage_3 import live_by_position, persistent_parameters
from lightning_shard.precision.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Point:
    """A moment of a step."""

    name: str
    """Such as "backward of model.layers.3"."""

    account: MemoryAccount


def walk(
    model: ModelFacts,
    engine: EngineFacts,
    policy: PrecisionPolicy,
    optimizer: OptimizerFacts,
    trace: Trace,
    *,
    micro_batches: int = 1,
) -> list[Point]:
    """Every part of the micro-batch of a step that needs most, and the optimizer's step."""
    moments = predict(model, engine, policy, optimizer, micro_batches=micro_batches)
    if isinstance(engine, DeepSpeedFacts):
        points = list(_zero(model, engine, moments, trace, policy))
    elif isinstance(engine, TorchDDPFacts):
        points = list(_ddp(model, engine, moments, trace, policy))
    else:
        shards = as_shards(engine)
        units = _Units(model, shards, moments, trace, policy)
        points = list(units.points())
        if micro_batches > 2 and shards.reduce_at_boundary:
            # Those between the first and the last, which give nothing back.
            points = [*units.points(reduces=False), *points]
    return [*points, _step_point(moments, optimizer, trace)]


def peak(points: Sequence[Point]) -> Point:
    """The point where most is on the device."""
    return max(points, key=lambda point: point.account.device.total)


def _step_point(moments: Moments, optimizer: OptimizerFacts, trace: Trace) -> Point:
    """The optimizer's step: what it steps is the masters, or the parameters where there are none."""
    account = moments.step
    way = KindBytes(optimizer=int(optimizer.on_the_way * _stepped(account.device)))
    left = KindBytes(activations=trace.segments[-1].end, gradients=moments.left)
    host = KindBytes(optimizer=int(optimizer.on_the_way * _stepped(account.host)))
    return Point(name="optimizer step", account=account + MemoryAccount(device=way + left, host=host))


def _stepped(kinds: KindBytes) -> int:
    return 0 if not kinds.optimizer else kinds.masters or kinds.parameters


def _name(segment: Segment) -> str:
    return f"{segment.phase} of {segment.unit}" if segment.unit else f"{segment.phase} outside of units"


def _elements(model: ModelFacts, pieces: int = 1) -> dict[str, int]:
    """Elements of a rank's gradients of each unit."""
    found = dict.fromkeys(model.units, 0)
    for p in model.trainable:
        found[p.unit] += p.numel if p.whole else shard_elements(p.shape, pieces) if p.shape else 1
    return found


def _ddp(
    model: ModelFacts, engine: TorchDDPFacts, moments: Moments, trace: Trace, policy: PrecisionPolicy
) -> Iterator[Point]:
    """Gradients are made whole, and stay."""
    elements = _elements(model)
    base = replace(moments.step, device=replace(moments.step.device, gradients=0))
    done: tuple[str, ...] = ()
    # Gradients that lie in buckets, and those that are added to sums, are nothing more.
    in_place = engine.gradient_as_bucket_view or (engine.reduce_at_boundary and moments.waiting > 0)
    for segment in trace.segments:
        kept = moments.forward.device.gradients
        if segment.phase == "backward" and not in_place:
            kept = moments.waiting + sum(elements[name] for name in done) * policy.master.itemsize + segment.gradients
        elif segment.phase == "backward" and engine.gradient_as_bucket_view and not engine.reduce_at_boundary:
            kept += moments.waiting
        if in_place:
            segment = replace(segment, together=segment.activations, gradients=0)
        yield Point(name=_name(segment), account=_with(base, segment, gradients=kept))
        done = segment.done or done


def _with(
    base: MemoryAccount, segment: Segment, *, gradients: int, gathered: int = 0, communication: int = 0
) -> MemoryAccount:
    """``base`` with what a segment adds when it makes most; ``gradients``: all that are there then."""
    added = KindBytes(
        gradients=gradients,
        gathered=gathered,
        communication=communication,
        activations=segment.together - segment.gradients,
    )
    return base + MemoryAccount(device=added)


class _Units:
    """FSDP2: units are gathered, freed and reduced one after the other, in the order of the trace."""

    def __init__(
        self, model: ModelFacts, engine: FSDPFacts, moments: Moments, trace: Trace, policy: PrecisionPolicy
    ) -> None:
        size = engine.shard
        self.engine, self.moments, self.trace, self.policy = engine, moments, trace, policy
        self.whole = {name: gathered_bytes(members, size, policy.compute) for name, members in model.units.items()}
        self.reduced = {name: reduced_bytes(members, size, policy.reduce) for name, members in model.units.items()}
        self.elements = _elements(model, size)
        self.before = {name: trace.order[i - 1] for i, name in enumerate(trace.order) if i}
        self.waiting = {name: raw_bytes(members, policy.reduce) for name, members in model.units.items()}
        step = moments.step
        self.base = MemoryAccount(device=replace(step.device, gradients=0), host=replace(step.host, gradients=0))

    def points(self, *, reduces: bool = True) -> Iterator[Point]:
        """In the order of the step; ``reduces``: its gradients are reduced, and not added to those that wait whole."""
        done: tuple[str, ...] = ()
        passed: dict[str, None] = {}
        last = end = 0
        for segment in self.trace.segments:
            backward = segment.phase == "backward"
            gathered = self._gathered(segment.unit, [name for name in passed if name not in done], done)
            in_flight = self._in_flight(segment, next(reversed(passed), ""))
            kept = self._kept(done if reduces else ())
            if segment.unit and segment.unit not in done and self.engine.shard > 1:
                yield self._gathering(segment, kept, gathered, end, last * backward)
            end = segment.end + segment.unfinished
            yield Point(
                name=_name(segment),
                account=kept
                + _with(
                    self.base,
                    segment,
                    gradients=segment.gradients,
                    gathered=gathered,
                    communication=in_flight + last * backward,
                ),
            )
            for name in [name for name in segment.done if name not in done and reduces]:
                yield self._reduction(name, segment, kept, gathered, in_flight)
                last = self.reduced[name]
            done = segment.done or done
            if not backward and segment.unit:
                passed[segment.unit] = None

    def _gathered(self, unit: str, passed: Sequence[str], done: Sequence[str]) -> int:
        """Bytes of the root, of the unit that computes, and of those that stay or leave a part behind."""
        others = sum(self.whole.get(name, 0) for name in passed if name != unit)
        again = self.engine.reshard_after_forward
        own = self.whole.get(unit, 0) if unit and unit not in done else 0
        return self.whole[""] + own + (others if again is False else 0 if again is True else others // again)

    def _in_flight(self, segment: Segment, last: str) -> int:
        """Bytes of all-gather buffers: in forward the unit's own or the last one's, in backward the next one's."""
        if self.engine.shard == 1:
            return 0
        if segment.phase == "forward":
            return self.whole.get(segment.unit or last, 0)
        if self.engine.reshard_after_forward is False:
            return 0
        return self.whole.get(self.before.get(segment.unit, "-"), 0)

    def _kept(self, done: Sequence[str]) -> MemoryAccount:
        """Reduced gradients, those of earlier micro-batches among them, and gradients that wait whole on the device."""
        reduced = sum(self.elements[name] for name in done) * self.policy.master.itemsize
        whole = 0
        if self.engine.reduce_at_boundary and self.moments.waiting:
            whole = sum(size for name, size in self.waiting.items() if name not in done)
        else:
            reduced = max(reduced, self.moments.waiting)
        if self.engine.cpu_offload:
            return MemoryAccount(device=KindBytes(gradients=whole), host=KindBytes(gradients=reduced))
        return MemoryAccount(device=KindBytes(gradients=whole + reduced))

    def _gathering(self, segment: Segment, kept: MemoryAccount, gathered: int, before: int, reducing: int) -> Point:
        """The unit is copied out of its all-gather buffer; ``before``: bytes that the step holds at that time."""
        buffer = self.whole.get(segment.unit, 0)
        if segment.phase == "backward" and self.engine.reshard_after_forward is False:
            buffer = 0
        start = replace(segment, together=before, gradients=0)
        account = kept + _with(self.base, start, gradients=0, gathered=gathered, communication=buffer + reducing)
        return Point(name=f"{segment.phase} of {segment.unit}, gathering", account=account)

    def _reduction(self, name: str, segment: Segment, kept: MemoryAccount, gathered: int, in_flight: int) -> Point:
        """The unit is freed, then its gradients, whole, are copied into the buffer that they are reduced from."""
        at_end = replace(segment, together=segment.reduced or segment.end, gradients=0)
        out = self.elements[name] * self.policy.reduce.itemsize
        freed = self.whole[name] if name and name == segment.unit else 0
        account = kept + _with(
            self.base,
            at_end,
            gradients=out,
            gathered=gathered - freed,
            communication=in_flight + self.reduced[name],
        )
        return Point(name=f"reduction of {name or 'the root'}", account=account)


def _zero(
    model: ModelFacts, engine: DeepSpeedFacts, moments: Moments, trace: Trace, policy: PrecisionPolicy
) -> Iterator[Point]:
    """DeepSpeed takes gradients one by one, so that only those that it keeps are there besides activations."""
    elements = _elements(model)
    total = max(1, sum(elements.values()))
    persistent = {p.fqn for p in persistent_parameters(model.parameters, engine)} if engine.stage == 3 else set()
    places = live_by_position(model, engine, persistent, trace.order) if engine.stage == 3 else {}
    forward, backward = moments.forward, moments.backward
    always = moments.step.device.gathered
    done: tuple[str, ...] = ()
    for segment in trace.segments:
        # Buckets are made with the first gradient.
        base = backward if segment.begun else forward
        device = replace(base.device, activations=segment.activations)
        if segment.begun:
            reached = sum(elements[name] for name in {*done, *([] if engine.stage <= 1 else [segment.unit])})
            device = replace(device, **_zero_gradients(engine, moments, reached, total))
        if engine.stage <= 1 and not moments.waiting:
            # They stay as they are made, also those of a unit that has not all of its own.
            gradients = device.gradients + segment.gradients
            device = replace(device, activations=segment.together - segment.gradients, gradients=gradients)
        if engine.stage == 3:
            live = places.get((segment.phase, segment.unit), 0)
            device = replace(device, gathered=always + live * policy.compute.itemsize)
        yield Point(name=_name(segment), account=replace(base, device=device))
        done = segment.done or done
    end = replace(
        backward.device,
        gathered=always,
        gradients=backward.device.gradients - moments.made - moments.moved,
        activations=trace.segments[-1].end,
    )
    yield Point(name="end of backward", account=replace(backward, device=end))


def _zero_gradients(engine: DeepSpeedFacts, moments: Moments, reached: int, total: int) -> dict[str, int]:
    """Gradients and communication of the device in backward, when those of ``reached`` elements may be there."""
    before, after = moments.forward.device.gradients, moments.backward.device.gradients - moments.made
    communication = moments.backward.device.communication - moments.at_end
    if engine.stage <= 1:
        # They grow from what is there before the first to what there is after the last.
        return {"gradients": before + int((after - before) * reached / total), "communication": communication}
    # Stage 2 makes its partition when the first bucket is full, stage 3 for the whole run.
    full = reached > engine.reduce_bucket_size
    return {"gradients": after if full else before, "communication": communication}
