"""What a run needs under an engine: memory in each part of its step, the largest batch, the fewest devices, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_shard.engines.engine import Engine, PlannedRun
from lightning_shard.engines.facts import EngineFacts
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters import fake_tensors
from lightning_shard.planning.facts import OptimizerFacts, facts_of
from lightning_shard.planning.largest_batch import Run, Traces, confirmed_batch, fewest_devices, largest_batch
from lightning_shard.planning.memory_trace import Step, Trace, batch_size_of, scaled, trace_step
from lightning_shard.planning.predict import collectives
from lightning_shard.planning.report import Row
from lightning_shard.planning.traffic import Collective, Nodes, StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What a run is planned on."""

    nodes: Nodes
    memory: int  # Bytes of a device that the run may use.
    # FLOPs per second that the model reaches on a device; None: the time of a step is not known.
    flops: float | None = None
    intra_node: float | None = None  # Bytes per second of a device's links inside its node.
    inter_node: float | None = None  # Bytes per second of a node's links to others, all together.


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine with its settings, and what is assumed of a run under it."""

    name: str
    engine: Engine
    run: PlannedRun
    checkpointing: Checkpointing = None


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
    batch: Any = None  # The first batch of the data: tensors on the CPU in any nesting.
    notes: list[str] = field(default_factory=list)  # What the reader of the plan has to know.
    _traces: dict[str, Traces | ConfigurationError] = field(default_factory=dict)

    def row(self, candidate: Candidate, *, confirm: bool = False) -> Row:
        """A line of the comparison; ``confirm``: the largest batch is traced, and not found on a line alone."""
        try:
            engine, traces = self.engine(candidate), self._traced(candidate)
        except ConfigurationError as error:
            return Row(name=candidate.name, checkpointing=candidate.checkpointing, refused=str(error))
        run = Run(
            model=facts_of(self.module, candidate.engine, groups=self.groups),
            policy=candidate.run.policy,
            optimizer=self.optimizer,
            traces=traces,
            micro_batches=candidate.run.accumulate_grad_batches,
        )

        def engine_on(nodes: Nodes) -> EngineFacts | None:
            try:
                return self.engine(candidate, nodes)
            except ConfigurationError:
                return None

        memory = self.machines.memory
        sent = collectives(run.model, engine, run.policy, micro_batches=run.micro_batches)
        confirmed = self._confirmed_batch(candidate, run, engine) if confirm else largest_batch(run, engine, memory)
        return Row(
            name=candidate.name,
            checkpointing=candidate.checkpointing,
            points=tuple(run.points(engine)),
            largest_batch=confirmed,
            fewest=fewest_devices(run, engine_on, self.machines.nodes.devices, memory),
            sent=tuple(sent),
            time=self._time(run, sent),
        )

    def engine(self, candidate: Candidate, nodes: Nodes | None = None) -> EngineFacts:
        """The facts of an engine on the machines of the run, or on others.

        Raises:
            ConfigurationError: what a run on them would refuse.
        """
        run = candidate.run
        if nodes is not None:
            run = replace(run, ranks=nodes.ranks, per_node=nodes.devices)
        candidate.engine.check(run)
        return candidate.engine.facts(self.module, run)

    def _traced(self, candidate: Candidate) -> Traces | None:
        """The traces of a step at the batch and at twice the batch, which engines with the same units share."""
        units = [unit.names for unit in candidate.engine.units(self.module)]
        key = repr((candidate.checkpointing, units, candidate.run.policy))
        if key not in self._traces and self.training_step is not None:
            try:
                self._traces[key] = self._trace_twice(candidate)
            except ConfigurationError as error:
                if self._traces:
                    self._traces[key] = error
                else:
                    self.without_activations(error)
        found = self._traces.get(key)
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def _trace_twice(self, candidate: Candidate) -> Traces:
        one = self._trace(candidate, self.batch)
        try:
            return Traces(one=one, two=self._trace(candidate, self.batch, scale=2))
        except ConfigurationError as error:
            self.notes.append(f"the largest batch is not known: at twice the batch, {error}")
            return Traces(one=one)

    def without_activations(self, reason: object) -> None:
        """Trace nothing, and note why."""
        self.training_step = self.batch = None
        self.notes.append(f"ESTIMATE WITHOUT ACTIVATIONS: {reason}")

    def _trace(self, candidate: Candidate, batch: Any, *, scale: int = 1) -> Trace:
        assert self.training_step is not None
        units = candidate.engine.units(self.module)
        step = Step(training_step=self.training_step, batch=batch, units=units, checkpointing=candidate.checkpointing)
        with fake_tensors.fake_world(self.machines.nodes.ranks):
            return trace_step(self.module, step, candidate.run.policy, self.mode, scale=scale)

    def _confirmed_batch(self, candidate: Candidate, run: Run, engine: EngineFacts) -> int | None:
        def trace_at(size: int) -> Trace:
            with self.mode:
                batch = resized(tree_map(self._as_fake, self.batch), size)
            return self._trace(candidate, batch)

        try:
            largest, _, confirmed = confirmed_batch(run, engine, self.machines.memory, trace_at)
        except ConfigurationError as error:
            self.notes.append(f"the largest batch is on a line through two smaller ones: at a larger batch, {error}")
            return largest_batch(run, engine, self.machines.memory)
        if not confirmed and largest is not None:
            self.notes.append("a larger batch than the largest that is named may fit: memory grows unevenly with it")
        return largest

    def _as_fake(self, value: Any) -> Any:
        return fake_tensors.as_fake(value, self.mode) if isinstance(value, Tensor) else value

    def _time(self, run: Run, sent: Sequence[Collective]) -> StepTime | None:
        machines = self.machines
        if run.traces is None or machines.flops is None:
            return None
        flops = run.traces.one.flops * run.micro_batches
        inside, between = machines.intra_node, machines.inter_node
        return step_time(sent, machines.nodes, flops=flops, peak=machines.flops, inside=inside, between=between)


def resized(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples: repeated, and what is too much left out."""
    own = batch_size_of(batch)
    repeats = -(-size // own)
    larger, _ = scaled(batch, repeats)
    return tree_map(
        lambda t: t[:size] if isinstance(t, Tensor) and t.ndim and t.shape[0] == own * repeats else t, larger
    )
