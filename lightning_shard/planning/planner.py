"""What a run needs under an engine: memory in each part of its step, the largest batch, the fewest devices, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightning_shard.engines.engine import Engine, PlannedRun
from lightning_shard.engines.facts import EngineFacts
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.memory import MemoryAccount
from lightning_shard.planning.device_memory import DeviceMemory, device_memory
from lightning_shard.planning.facts import OptimizerFacts, Training, facts_of
from lightning_shard.planning.memory_trace import MEASURES, Step, Trace, resized, trace_step
from lightning_shard.planning.operators import Device
from lightning_shard.planning.predict import collectives, padding_note, predict, start_points, step_points
from lightning_shard.planning.report import Row
from lightning_shard.planning.step_memory import POINTS, Point, peak, with_averages
from lightning_shard.planning.step_time import Rates, StepTime, step_time
from lightning_shard.planning.traffic import Nodes
from lightning_shard.tensors import fake
from lightning_shard.tensors.tracing import tree_map_only


@dataclass(frozen=True, kw_only=True)
class Machines:
    nodes: Nodes
    memory: int  # Bytes of a device that the run may use.
    device: Device | None = None  # What it reaches; None: the time of a step is not known.
    intra_node: float | None = None  # Bytes per second of a device's links inside its node.
    inter_node: float | None = None  # Bytes per second of a node's links to others, all together.


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine with its settings, and what is assumed of a run under it."""

    name: str
    engine: Engine
    run: PlannedRun
    checkpointing: Checkpointing = None
    compiled: bool = False  # Whether the units' forward is.


@dataclass(kw_only=True)
class Planner:
    """A module whose tensors have no data, a step of it, and the traces of that step as they are asked for."""

    module: nn.Module
    mode: Any  # The mode in which the module's tensors have no data.
    machines: Machines
    optimizer: OptimizerFacts = field(default_factory=OptimizerFacts)
    groups: Sequence[Mapping[str, Any]] = ()  # The optimizer's parameter groups.
    # ``(batch) -> loss``, or to a mapping with ``loss``; None: nothing is traced, and activations are not known.
    training_step: Callable[[Any], Any] | None = None
    # "beside" what is stepped, or on the "host": where a callback keeps averages of weights; None: there are none.
    averages: str | None = None
    batch: Any = None  # The first batch of the data: tensors on the CPU in any nesting.
    notes: list[str] = field(default_factory=list)  # What the reader of the plan has to know.
    _traces: dict[str, Traces | ConfigurationError] = field(default_factory=dict)

    def row(self, candidate: Candidate, *, confirm: bool = False) -> Row:
        """A line of the comparison; ``confirm``: the largest batch is traced, and not found on a line alone."""
        try:
            run, engine = self.run(candidate)
        except ConfigurationError as error:
            return Row(name=candidate.name, checkpointing=candidate.checkpointing, refused=str(error))
        assert run.needs is not None

        def engine_on(nodes: Nodes) -> EngineFacts | None:
            try:
                return self.engine(candidate, nodes)
            except ConfigurationError:
                return None

        memory, padded = self.machines.memory, padding_note(run.training, engine) if confirm else None
        self.notes += [] if padded is None else [padded]
        sent = collectives(run.training, engine)
        confirmed = self._confirmed_batch(candidate, run, engine) if confirm else largest_batch(run, engine, memory)
        return Row(
            name=candidate.name,
            checkpointing=candidate.checkpointing,
            points=tuple(run.points(engine)),
            needs=run.needs,
            traced=run.traces is not None,
            saved=run.training.saved // engine.ranks,
            largest_batch=confirmed,
            fewest=fewest_devices(run, engine_on, self.machines.nodes.devices, memory),
            sent=tuple(sent),
            time=self.time(run, engine, compiled=candidate.compiled),
        )

    def run(self, candidate: Candidate, *, replays: bool = True) -> tuple[Run, EngineFacts]:
        """What the memory and the time of a candidate follow from; ``replays``: with what lies beside its tensors.

        ConfigurationError: what a run would raise.
        """
        engine, traces = self.engine(candidate), self._traced(candidate)
        training = Training(
            model=facts_of(self.module, candidate.engine, groups=self.groups),
            policy=candidate.run.policy,
            optimizer=self.optimizer,
            micro_batches=candidate.run.accumulate_grad_batches,
        )
        run = Run(training=training, traces=traces, averages=self.averages)
        if not replays:
            return run, engine
        needs = run.measured(engine)
        if traces is not None and traces.two is not None:
            needs = needs.growing(run.measured(engine, traces.two.batch_size))
        return replace(run, needs=needs), engine

    def engine(self, candidate: Candidate, nodes: Nodes | None = None) -> EngineFacts:
        """The facts of an engine on the machines of the run, or on others; raises what a run would."""
        nodes = nodes or self.machines.nodes
        run = replace(candidate.run, ranks=nodes.ranks, per_node=nodes.devices)
        candidate.engine.check(run)
        return candidate.engine.facts(self.module, run)

    def _traced(self, candidate: Candidate) -> Traces | None:
        """The traces of a step at the batch and at twice the batch, which engines with the same units share."""
        units = [(unit.names, unit.rule.compute) for unit in candidate.engine.units(self.module)]
        key = repr((candidate.checkpointing, units, candidate.run.policy))
        if key not in self._traces and self.training_step is not None:
            try:
                one, two = self._trace(candidate, self.batch), None
                try:
                    two = self._trace(candidate, self.batch, scale=2)
                except ConfigurationError as error:
                    self.notes.append(f"the largest batch is not known: at twice the batch, {error}")
                self._traces[key] = Traces(one=one, two=two)
            except ConfigurationError as error:
                if self._traces:
                    self._traces[key] = error
                else:
                    self.without_activations(error)
        found = self._traces.get(key)
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def without_activations(self, reason: object) -> None:
        self.training_step = self.batch = None
        self.notes.append(f"ESTIMATE WITHOUT ACTIVATIONS: {reason}")

    def _trace(self, candidate: Candidate, batch: Any, *, scale: int = 1) -> Trace:
        assert self.training_step is not None
        units = candidate.engine.units(self.module)
        step = Step(
            training_step=self.training_step,
            batch=batch,
            units=units,
            checkpointing=candidate.checkpointing,
            device=self.machines.device,
        )
        with fake.fake_world(self.machines.nodes.ranks):
            return trace_step(self.module, step, candidate.run.policy, self.mode, scale=scale)

    def _confirmed_batch(self, candidate: Candidate, run: Run, engine: EngineFacts) -> int | None:
        def trace_at(size: int) -> Trace:
            with self.mode:
                faked = tree_map_only(Tensor, lambda t: fake.as_fake(t, self.mode), self.batch)
                batch = resized(faked, size)
            return self._trace(candidate, batch)

        try:
            largest, _, confirmed = confirmed_batch(run, engine, self.machines.memory, trace_at)
        except ConfigurationError as error:
            self.notes.append(f"the largest batch is on a line through two smaller ones: at a larger batch, {error}")
            return largest_batch(run, engine, self.machines.memory)
        if not confirmed and largest is not None:
            self.notes.append("a larger batch than the largest that is named may fit: memory grows unevenly with it")
        return largest

    def time(self, run: Run, engine: EngineFacts, *, compiled: bool, batch: int | None = None) -> StepTime | None:
        """Of the run's batch, or of another; None: there is no trace, or the device is not known."""
        machines = self.machines
        if run.traces is None or machines.device is None:
            return None
        trace = run.traces.one if batch is None else run.traces.at(batch)
        inside, between = machines.intra_node, machines.inter_node
        rates = Rates(device=machines.device, nodes=machines.nodes, inside=inside, between=between)
        return step_time(run.training, engine, trace, rates, compiled=compiled)


LARGEST_BATCH = 2**20
MOST_NODES = 4096
MOST_TRACES = 8  # That are made to confirm a batch.


@dataclass(frozen=True, kw_only=True)
class Traces:
    """A step at two batches or more, between which and beyond which every part is taken as linear."""

    one: Trace
    two: Trace | None = None  # At twice the batch; None: only the batch of ``one`` is known.
    more: tuple[Trace, ...] = ()  # At other batches.

    @property
    def scales(self) -> bool:
        return self.two is not None and _parts(self.one) == _parts(self.two)

    def traced(self, batch: int) -> bool:
        return any(trace.batch_size == batch for trace in self._all)

    @property
    def _all(self) -> list[Trace]:
        return [self.one, *([] if self.two is None else [self.two]), *self.more]

    def at(self, batch: int) -> Trace:
        """The step at another batch, on the line through the two traces nearest to it, one on each side if there is."""
        for trace in self._all:
            if trace.batch_size == batch or self.two is None:
                return trace
        known = sorted((t for t in self._all if _parts(t) == _parts(self.one)), key=lambda t: t.batch_size)
        above = next((i for i, t in enumerate(known) if t.batch_size > batch), len(known) - 1)
        a, b = known[max(0, above - 1)], known[max(1, above)]
        ratio = (batch - a.batch_size) / (b.batch_size - a.batch_size)
        segments = [
            replace(x, **{name: _line(getattr(x, name), getattr(y, name), ratio) for name in MEASURES})  # type: ignore[arg-type]
            for x, y in zip(a.segments, b.segments, strict=True)
        ]
        return replace(
            self.one,
            segments=tuple(segments),
            events=(),
            work=tuple(x.line(y, ratio) for x, y in zip(a.work, b.work, strict=True)),
            batch_size=batch,
            forward_flops=_line(a.forward_flops, b.forward_flops, ratio),
            backward_flops=_line(a.backward_flops, b.backward_flops, ratio),
        )


def _parts(trace: Trace) -> list[tuple[str, str, bool]]:
    return [(s.phase, s.unit, s.has_gradients) for s in trace.segments]


def _line(a: int, b: int, ratio: float) -> int:
    return max(0, round(a + (b - a) * ratio))


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that the memory of a rank follows from, but for the engine and the batch."""

    training: Training
    traces: Traces | None  # None: activations are not known.
    averages: str | None = None
    needs: DeviceMemory | None = None  # At the batch of the run; None: what lies beside tensors does not count.

    def points(self, engine: EngineFacts, batch: int | None = None) -> list[Point]:
        """The moments of a step; without a trace, the three of the arithmetic."""
        if self.traces is None:
            moments = predict(self.training, engine)
            points = [Point(name=name, account=getattr(moments, name)) for name in POINTS]
        else:
            trace = self.traces.one if batch is None else self.traces.at(batch)
            points = [*start_points(self.training, engine), *step_points(self.training, engine, trace)]
        return [replace(point, account=with_averages(point.account, self.averages)) for point in points]

    def peak(self, engine: EngineFacts, batch: int | None = None) -> MemoryAccount:
        return peak(self.points(engine, batch)).account

    def most(self, engine: EngineFacts, batch: int | None = None) -> int:
        """Bytes of a device, with what may lie beside its tensors."""
        if self.traces is not None and self.needs and batch in {trace.batch_size for trace in self.traces.more}:
            return self.measured(engine, batch).high
        tensors = self.peak(engine, batch).device.total
        return tensors if self.needs is None else self.needs.at(tensors)

    def measured(self, engine: EngineFacts, batch: int | None = None) -> DeviceMemory:
        """All that a device holds, its allocator's blocks too, at the batch of the run or at another that is traced."""
        traces = self.traces
        trace = None if traces is None else traces.one if batch is None else traces.at(batch)
        return device_memory(self.points(engine, batch), self.training, engine, trace)


def largest_batch(run: Run, engine: EngineFacts, memory: int) -> int | None:
    """The most samples per rank and micro-batch that fit into ``memory`` bytes; 0: none; None: not known."""
    if run.traces is None or not run.traces.scales:
        return None

    def fits(batch: int) -> bool:
        return run.most(engine, batch) <= memory

    low, high = 0, 1
    while high < LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    return _last(low, high, fits)


def confirmed_batch(
    run: Run, engine: EngineFacts, memory: int, trace_at: Callable[[int], Trace]
) -> tuple[int | None, Run, bool]:
    """`largest_batch`, whose own trace fits, and that of a batch a quarter larger (or 1) does not.

    A trace that says otherwise makes the line better on which the next batch is looked for. Returns also the run with
    the traces that were made, and whether the batch is confirmed: if it is not after `MOST_TRACES`, it is the largest
    of those whose own traces fit.
    """
    fitting: set[int] = set()
    for _ in range(MOST_TRACES // 2):
        batch = largest_batch(run, engine, memory)
        if batch is None or batch == 0 or batch >= LARGEST_BATCH - 1:
            # Not known, none, or no end in sight.
            return batch, run, batch is not None
        larger = max(batch + 1, batch * 5 // 4)
        for size in (batch, larger):
            if run.traces is not None and not run.traces.traced(size):
                run = replace(run, traces=replace(run.traces, more=(*run.traces.more, trace_at(size))))
        if run.needs is not None:
            # Nearer to the batch that is looked for than the run's own.
            run = replace(run, needs=run.measured(engine, batch))
        fits = [run.most(engine, size) <= memory for size in (batch, larger)]
        fitting |= {size for size, does in zip((batch, larger), fits, strict=True) if does}
        if fits == [True, False]:
            return batch, run, True
    return max(fitting, default=0), run, False


def fewest_devices(
    run: Run, engine_on: Callable[[Nodes], EngineFacts | None], devices: int, memory: int
) -> Nodes | None:
    """The fewest devices on which the batch fits, nodes of ``devices`` whole ones; None: it does on none.

    ``engine_on`` gives the engine on some machines; None: its settings do not fit that number.
    """

    def fits(nodes: Nodes) -> bool:
        engine = engine_on(nodes)
        return engine is not None and run.most(engine) <= memory

    for count in range(1, devices + 1):
        if fits(Nodes(nodes=1, devices=count)):
            return Nodes(nodes=1, devices=count)
    low, high = 1, 2
    while not fits(Nodes(nodes=high, devices=devices)):
        low, high = high, 2 * high
        if low >= MOST_NODES:
            return None
    return Nodes(nodes=_last(low, high, lambda n: not fits(Nodes(nodes=n, devices=devices))) + 1, devices=devices)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number for which ``holds`` does, which it does at ``low`` and not at ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
