"""Plan a run on an engine: memory in each part of a step, largest batch, fewest devices, traffic and time.

Search the fastest form of a run that fits and keeps its global batch, over engines, batches and compilation.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from lightning_shard.engines.engine import Engine, PlannedRun
from lightning_shard.engines.memory_model import EngineFacts
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.planning.device_memory import DeviceMemory, Range, device_memory, verdict
from lightning_shard.planning.fsdp_memory import padding_note
from lightning_shard.planning.memory_trace import MEASURES, Segment, Step, Trace, batch_size_of, trace_step
from lightning_shard.planning.model_facts import OptimizerFacts, Training, facts_of
from lightning_shard.planning.predict import collectives, start_points, step_points
from lightning_shard.planning.report import FORMS, LARGEST_BATCH, Row, show_range
from lightning_shard.planning.step_memory import Point, peak, with_averages
from lightning_shard.planning.step_time import Rates, StepTime, step_time
from lightning_shard.planning.traffic import Nodes
from lightning_shard.tensors import fake
from lightning_shard.text import show_seconds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine with its settings, and the run that is planned on it."""

    name: str
    engine: Engine
    run: PlannedRun
    checkpointing: Checkpointing = None
    compiled: bool = False  # Whether the units' forward is compiled.
    init_args: Mapping[str, Any] = field(default_factory=dict)  # The strategy's arguments besides the name's own.


@dataclass(kw_only=True)
class Planner:
    """Plans a module whose tensors have no data. It traces a step for each set of units and checkpointing once."""

    module: nn.Module
    mode: Any  # The fake mode of the module's tensors.
    nodes: Nodes  # The machines.
    memory: int  # Bytes of a device that the run may use.
    rates: Rates | None = None  # The machines' rates. None: the time of a step is unknown.
    optimizer: OptimizerFacts = field(default_factory=OptimizerFacts)
    groups: Sequence[Mapping[str, Any]] = ()  # The optimizer's parameter groups.
    # ``(batch) -> loss``, or a mapping with ``loss``. None: nothing is traced, and activations are unknown.
    training_step: Callable[[Any], Any] | None = None
    averages: str | None = None  # Memory of a callback's averages of weights: "masters" or "host". None: no averages.
    cpu: bool = False  # Whether the devices are CPUs.
    batch: Any = None  # The first batch of the data: tensors on the CPU in any nesting.
    notes: list[str] = field(default_factory=list)  # Notes for the reader of the plan.
    _traces: dict[str, tuple[Trace, ...] | ConfigurationError] = field(default_factory=dict)

    def row(self, candidate: Candidate, *, confirm: bool = False) -> Row:
        """A line of the comparison. ``confirm``: confirm the largest batch by traces."""
        try:
            run = self.run(candidate)
        except ConfigurationError as error:
            return Row(name=candidate.name, checkpointing=candidate.checkpointing, refused=str(error))
        largest = largest_batch(run, self.memory)
        if confirm:
            if note := padding_note(run.training, run.engine):
                self.notes.append(note)
            try:
                largest = confirmed_batch(run, self.memory, partial(self._trace, candidate))
            except ConfigurationError as error:
                told = "the largest batch is extrapolated from two smaller ones: at a larger batch, "
                self.notes.append(f"{told}{error}")
        return Row(
            name=candidate.name,
            checkpointing=candidate.checkpointing,
            points=tuple(run.points()),
            needs=run.needs,
            cpu=self.cpu,
            traced=bool(run.traces),
            saved=run.training.saved // run.engine.ranks,
            largest_batch=largest and by_own_batch(run, self.memory, *largest),
            fewest=self._fewest_devices(candidate, run),
            sent=tuple(collectives(run.training, run.engine)),
            time=self.time(run, compiled=candidate.compiled),
        )

    def _fewest_devices(self, candidate: Candidate, run: "Run") -> tuple[Nodes | None, Nodes | None]:
        """The fewest devices on which the batch fits, and may fit, in one node or in full ones. None: no number."""

        def fits(end: int, nodes: int, devices: int = self.nodes.devices) -> bool:
            try:
                engine = self.engine(candidate, Nodes(nodes=nodes, devices=devices))
            except ConfigurationError:
                return False
            return run.needs.at(replace(run, engine=engine).tensors())[end] <= self.memory

        def fewest(end: int) -> Nodes | None:
            for count in range(1, self.nodes.devices + 1):
                if fits(end, 1, count):
                    return Nodes(nodes=1, devices=count)
            nodes = _least(partial(fits, end), MOST_NODES)
            if nodes is None and fits(end, self.nodes.nodes):  # A mesh with sizes allows this number only.
                return self.nodes
            return None if nodes is None else Nodes(nodes=nodes, devices=self.nodes.devices)

        return fewest(1), fewest(0)

    def run(self, candidate: Candidate) -> "Run":
        """The model of a candidate's memory and time. ConfigurationError: a run would raise it."""
        training = Training(
            model=facts_of(self.module, candidate.engine, groups=self.groups),
            policy=candidate.run.policy,
            optimizer=self.optimizer,
            micro_batches=candidate.run.accumulate_grad_batches,
            manual=not getattr(self.module, "automatic_optimization", True),
        )
        run = Run(training=training, engine=self.engine(candidate), averages=self.averages, cpu=self.cpu)
        return replace(run, traces=self._traced(candidate))

    def engine(self, candidate: Candidate, nodes: Nodes | None = None) -> EngineFacts:
        """The facts of an engine on ``nodes`` (default: the run's). ConfigurationError: a run would raise it."""
        run = candidate.run if nodes is None else replace(candidate.run, ranks=nodes.ranks, per_node=nodes.devices)
        candidate.engine.check(run)
        return candidate.engine.memory_model(self.module, run)

    def _traced(self, candidate: Candidate) -> tuple[Trace, ...]:
        """The traces of a step at the batch and at twice the batch. Engines with the same units share them."""
        units = [(unit.name, unit.rule.compute) for unit in candidate.engine.units(self.module)]
        key = repr((candidate.checkpointing, units, candidate.run.policy))
        if key not in self._traces and self.training_step is not None:
            size = batch_size_of(self.batch)
            try:
                self._traces[key] = one = (self._trace(candidate, size),)
                self._traces[key] = (*one, self._trace(candidate, 2 * size))
            except ConfigurationError as error:
                if key in self._traces:
                    self.notes.append(f"the largest batch is not known: at twice the batch, {error}")
                elif self._traces:
                    self._traces[key] = error
                else:
                    self.without_activations(error)
        found = self._traces.get(key, ())
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def without_activations(self, reason: object) -> None:
        self.training_step = self.batch = None
        self.notes.append(f"ESTIMATE WITHOUT ACTIVATIONS: {reason}")

    def _trace(self, candidate: Candidate, batch_size: int) -> Trace:
        assert self.training_step is not None
        units, device = candidate.engine.units(self.module), None if self.rates is None else self.rates.device
        step = Step(training_step=self.training_step, batch=self.batch, units=units, device=device)
        step = replace(step, checkpointing=candidate.checkpointing)
        with fake.fake_world(self.nodes.ranks):
            return trace_step(self.module, step, candidate.run.policy, self.mode, batch_size=batch_size)

    def time(self, run: "Run", *, compiled: bool, batch: int | None = None) -> StepTime | None:
        """The time of a step with the run's batch or another. None: there is no trace, or the device is unknown."""
        if not run.traces or self.rates is None:
            return None
        return step_time(run.training, run.engine, run.at(batch), self.rates, compiled=compiled)


MOST_NODES = 4096
MOST_TRACES = 8  # Limit of traces to confirm a batch.


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model of a rank's memory as a function of the batch."""

    training: Training
    engine: EngineFacts
    # The step at the run's batch, then at others. Each part is linear in the batch. Empty: activations are unknown.
    traces: tuple[Trace, ...] = ()
    averages: str | None = None  # As for `Planner`.
    cpu: bool = False  # As for `Planner`.

    @property
    def comparable(self) -> list[Trace]:
        """The traces with the structure of the first, by batch. Two of them determine all other batches."""
        same = (trace for trace in self.traces if trace.parts == self.traces[0].parts)
        return sorted(same, key=lambda trace: trace.batch_size)

    def at(self, batch: int | None = None) -> Trace:
        """The step at a batch (default: the run's), on the line through the two nearest traces, if possible one smaller
        and one larger.
        """
        for trace in self.traces:
            if batch is None or trace.batch_size == batch or len(self.traces) == 1:
                return trace
        assert batch is not None
        known = self.comparable
        above = next((i for i, t in enumerate(known) if t.batch_size > batch), len(known) - 1)
        a, b = known[max(0, above - 1)], known[max(1, above)]
        ratio = (batch - a.batch_size) / (b.batch_size - a.batch_size)
        segments = []
        for x, y in zip(map(vars, a.segments), map(vars, b.segments), strict=True):
            bytes_of = {name: max(0, round(x[name] + (y[name] - x[name]) * ratio)) for name in MEASURES}
            segments.append(Segment(**{**x, **bytes_of}))
        work = tuple(x.interpolate(y, ratio) for x, y in zip(a.work, b.work, strict=True))
        return Trace(segments=tuple(segments), batch_size=batch, work=work)

    def points(self, batch: int | None = None) -> list[Point]:
        trace = self.at(batch) if self.traces else None
        points = [*start_points(self.training, self.engine), *step_points(self.training, self.engine, trace)]
        return [replace(point, account=with_averages(point.account, self.averages)) for point in points]

    def tensors(self, batch: int | None = None) -> int:
        return peak(self.points(batch), cpu=self.cpu).held(cpu=self.cpu)

    @cached_property
    def needs(self) -> DeviceMemory:
        """The bytes of a device at the run's batch, with the allocator's blocks."""
        found = []
        for trace in self.traces[:2] or (None,):
            points = self.points(trace.batch_size if trace else None)
            found.append(device_memory(points, self.training, self.engine, trace, cpu=self.cpu))
        own, larger = found[0], found[-1]
        if len(found) < 2 or larger.tensors <= own.tensors:
            return own
        # Fragmentation varies irregularly with the batch. Growth below 0, or above the tensors', is chance.
        growth = (larger.blocks[1] - own.blocks[1]) / (larger.tensors - own.tensors)
        return replace(own, growth=min(1.0, max(0.0, growth)))


def largest_batch(run: Run, memory: int, device: Callable[[int], Range] | None = None) -> Range | None:
    """The most samples per rank and micro-batch that fit into ``memory`` bytes, and that may fit. None: unknown.
    ``device`` maps bytes of tensors to bytes of a device (default: `Run.needs`).
    """
    if len(run.comparable) < 2:
        return None
    needs = device or run.needs.at

    def most(end: int) -> int:
        def too_large(batch: int) -> bool:
            tensors = run.tensors(batch)
            return tensors > memory or needs(tensors)[end] > memory

        return (_least(too_large, LARGEST_BATCH) or LARGEST_BATCH) - 1

    sure = most(1)
    return sure, max(sure, most(0))


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """The least number from 1 to ``most`` for which ``holds``, which is monotonic, is true. None: it never is."""
    low, high = 0, 1
    while not holds(high):
        low, high = high, 2 * high
        if low >= most:
            return None
    return bisect_left(range(high), True, lo=low + 1, key=holds)


def by_own_batch(run: Run, memory: int, sure: int, may: int) -> Range:
    """The largest batches, corrected by the verdict about the run's own batch, which is more exact."""
    own, told = run.traces[0].batch_size, verdict(run.needs.bounds, memory)
    sure = max(sure, own) if told == "fits" else min(sure, own - 1)
    return sure, max(sure, min(may, own - 1) if told == "does not fit" else max(may, own))


def confirmed_batch(run: Run, memory: int, trace_at: Callable[[int], Trace]) -> Range | None:
    """`largest_batch`, confirmed by traces: its step fits, and a step with a quarter more samples (at least one more)
    does not. A trace that contradicts this is added to the known ones and the search repeats, with at most
    `MOST_TRACES` traces.
    """
    fits: dict[int, bool] = {}
    known_needs: dict[int, Range] = {}  # Bytes of a device by bytes of its tensors, at traced batches.

    def device(tensors: int) -> Range:
        return known_needs.get(tensors, replace(run.needs, growth=None).at(tensors))

    for _ in range(MOST_TRACES // 2):
        found = largest_batch(run, memory, device)
        if not found or found[0] in (0, LARGEST_BATCH - 1):
            # Unknown, none, or beyond the search's end.
            break
        batch, may = found
        larger = max(batch + 1, batch * 5 // 4)
        for size in (larger, batch):
            # First in the order, because overhead is computed at the first trace's batch, which should be the nearest.
            known = {trace.batch_size: trace for trace in run.traces}
            trace = known.pop(size) if size in known else trace_at(size)
            run = replace(run, traces=(trace, *known.values()))
            own = replace(run, traces=run.traces[:1]).needs
            known_needs[own.tensors], fits[size] = own.bounds, own.bounds[1] <= memory
        if fits[batch] and not fits[larger]:
            return batch, may
    if not fits:
        return found
    sure = max((size for size, does in fits.items() if does), default=0)
    return sure, max(sure, found[1] if found else 0)


BATCHES = 3  # The largest micro-batches that fit are timed. Smaller ones send the same bytes for fewer samples.


@dataclass(frozen=True, kw_only=True)
class Form:
    """A candidate of the search: a strategy with its arguments, batch and accumulation."""

    name: str  # The strategy's.
    init_args: Mapping[str, Any] = field(default_factory=dict)  # Besides the name's own.
    batch: int  # Samples per device and micro-batch.
    micro_batches: int
    time: StepTime
    device: Range  # Bytes of a device.
    sure: bool = True  # Whether it fits. False: it may fit.

    @property
    def cost(self) -> tuple[Any, ...]:
        """The key of a comparison: forms that surely fit come first, and of equal times the simpler form."""
        form = FORMS.index(self.init_args.get("activation_checkpointing"))
        settings = form, len(self.init_args), self.micro_batches, self.device[1] >> 20
        return not self.sure, round(self.time.expected, 5), *settings

    @property
    def cells(self) -> list[str]:
        settings = ", ".join(f"{key}: {value}" for key, value in self.init_args.items())
        shown = [show_seconds(self.time.expected), self.time.bound, show_range(self.device)]
        return [self.name, settings or "-", str(self.batch), str(self.micro_batches), *shown]


def forms(planner: Planner, candidate: Candidate, samples: int, *, compiles: bool) -> Iterator[Form]:
    """A candidate with micro-batches that fit and divide ``samples`` per device and step. Empty: it can't run."""
    try:
        run = planner.run(candidate)
    except ConfigurationError:
        return
    sure, may = largest_batch(run, planner.memory) or (0, 0)
    # If no batch surely fits, the smallest has the best chance.
    largest = min(sure or min(may, 1), samples)
    for batch in [batch for batch in range(largest, 0, -1) if samples % batch == 0][:BATCHES]:
        count = samples // batch
        own = replace(run, training=replace(run.training, micro_batches=count))
        device = run.needs.at(own.tensors(batch))
        form = partial(Form, name=candidate.name, batch=batch, micro_batches=count, device=device)
        for compiled in (False, True) if compiles else (False,):
            time = planner.time(own, compiled=compiled, batch=batch)
            if time is not None and device[0] <= planner.memory:
                given = {**candidate.init_args, **({"compile": True} if compiled else {})}
                yield form(init_args=given, time=time, sure=device[1] <= planner.memory)


def ranked(found: Iterable[Form]) -> list[Form]:
    best: dict[str, Form] = {}
    for form in sorted(found, key=lambda form: form.cost):
        best.setdefault(form.name, form)
    return list(best.values())
