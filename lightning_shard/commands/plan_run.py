"""What ``lightning-shard plan`` finds out of the engines: traces of the step, bytes, the largest batch, traffic."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_shard.commands import plan_inputs
from lightning_shard.commands.plan_inputs import Inputs
from lightning_shard.engines.engine import PlannedRun
from lightning_shard.engines.facts import EngineFacts
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.meters import fake_tensors
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.largest_batch import Run, Traces, confirmed_batch, fewest_devices, largest_batch
from lightning_shard.planning.memory_trace import Step, Trace, batch_size_of, scaled, trace_step
from lightning_shard.planning.optimizer_facts import trace_optimizer
from lightning_shard.planning.predict import collectives
from lightning_shard.planning.report import Row
from lightning_shard.planning.traffic import Nodes, StepTime, step_time
from lightning_shard.precision.casting import cast_trainable_parameters
from lightning_shard.run.memory import facts_of
from lightning_shard.strategies.strategy import ShardStrategy


@dataclass(kw_only=True)
class Planner:
    """A run that was read, and its traces as they are asked for."""

    inputs: Inputs
    nodes: Nodes
    options: argparse.Namespace
    memory: int
    """Bytes of a device that the run may use."""

    batch: Any = None
    optimizer: OptimizerFacts = field(default_factory=OptimizerFacts)
    optimizer_name: str | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)
    traces: dict[str, Traces | None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """The LightningModule."""
        return self.inputs.module

    def prepare(self) -> None:
        """Read the batch and trace the optimizer; what can't be is noted."""
        inputs = self.inputs
        if self.options.no_trace:
            self._without("--no-trace was given")
        else:
            try:
                loss = plan_inputs.loss_of(inputs.module)
                self.batch = plan_inputs.first_batch(inputs)
                size = self.options.batch_size
                self.batch = self.batch if size is None else _of_size(self.batch, size)
                self._loss = loss
            except ConfigurationError as error:
                self._without(error)
        try:
            optimizer = plan_inputs.optimizer_of(inputs)
            self.groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
            self.optimizer = _traced(inputs, self.groups)
            self.optimizer_name = type(optimizer).__name__
        except ShardError as error:
            self.notes.append(f"the optimizer's state is taken as Adam's, two slots: {error}")

    def _without(self, reason: object) -> None:
        self.batch = None
        self.notes.append(f"ESTIMATE WITHOUT ACTIVATIONS: {reason}")

    def run(self, strategy: ShardStrategy, checkpointing: Checkpointing) -> Run:
        """What the memory of a rank under ``strategy`` follows from."""
        return Run(
            model=self.facts(strategy),
            policy=strategy.policy,
            optimizer=self.optimizer,
            traces=self._traces(strategy, checkpointing),
            micro_batches=self.inputs.micro_batches,
        )

    def facts(self, strategy: ShardStrategy) -> ModelFacts:
        """Of the module under a strategy."""
        return facts_of(self.module, strategy.engine_for(self.module), groups=self.groups)

    def _traces(self, strategy: ShardStrategy, checkpointing: Checkpointing) -> Traces | None:
        units = strategy.engine_for(self.module).units(self.module)
        key = repr((checkpointing, [unit.names for unit in units], strategy.policy))
        if key not in self.traces and self.batch is not None:
            step = self._step(strategy, checkpointing)
            with fake_tensors.fake_world(self.nodes.ranks):
                try:
                    one = trace_step(self.module, step, strategy.policy, self.inputs.mode)
                    self.traces[key] = Traces(one=one)
                    two = trace_step(self.module, step, strategy.policy, self.inputs.mode, scale=2)
                    self.traces[key] = Traces(one=one, two=two)
                except ConfigurationError as error:
                    if key in self.traces:
                        self.notes.append(f"the largest batch is not known: at twice the batch, {error}")
                    elif any(self.traces.values()):
                        self.traces[key], self.failed[key] = None, str(error)
                    else:
                        self._without(error)
        return self.traces.get(key)

    def engine(self, strategy: ShardStrategy, nodes: Nodes) -> EngineFacts:
        """The engine of ``strategy`` on some machines."""
        return strategy.engine_for(self.module).facts(self.module, self.planned_run(strategy, nodes))

    def planned_run(self, strategy: ShardStrategy, nodes: Nodes) -> PlannedRun:
        """What ``strategy`` is told of a run on some machines."""
        return strategy.planned_run(
            ranks=nodes.ranks,
            per_node=nodes.devices,
            accumulate_grad_batches=self.inputs.micro_batches,
            optimizer=None if self.optimizer_name is None else {"type": self.optimizer_name},
        )

    def row(self, name: str, strategy: ShardStrategy, checkpointing: Checkpointing, *, confirm: bool = False) -> Row:
        """A line of the comparison; ``confirm``: the largest batch is traced, and not found on a line alone."""
        try:
            engine = self.engine(strategy, self.nodes)
        except ConfigurationError as error:
            return Row(name=name, checkpointing=checkpointing, refused=str(error))
        run = self.run(strategy, checkpointing)
        if run.traces is None and any(self.traces.values()):
            return Row(name=name, checkpointing=checkpointing, refused=next(iter(self.failed.values())))

        def engine_on(nodes: Nodes) -> EngineFacts | None:
            try:
                return self.engine(strategy, nodes)
            except ConfigurationError:
                return None

        largest = self._confirmed(run, strategy, checkpointing, engine) if confirm else None
        sent = collectives(run.model, engine, run.policy, micro_batches=run.micro_batches)
        return Row(
            name=name,
            checkpointing=checkpointing,
            points=tuple(run.points(engine)),
            largest_batch=largest if confirm else largest_batch(run, engine, self.memory),
            fewest=fewest_devices(run, engine_on, self.nodes.devices, self.memory),
            sent=tuple(sent),
            time=self._time(run, sent),
        )

    def _confirmed(
        self, run: Run, strategy: ShardStrategy, checkpointing: Checkpointing, engine: EngineFacts
    ) -> int | None:
        def trace_at(size: int) -> Trace:
            with self.inputs.mode:
                batch = _of_size(tree_map(self._as_fake, self.batch), size)
            step = replace(self._step(strategy, checkpointing), batch=batch)
            with fake_tensors.fake_world(self.nodes.ranks):
                return trace_step(self.module, step, strategy.policy, self.inputs.mode)

        try:
            largest, _, confirmed = confirmed_batch(run, engine, self.memory, trace_at)
        except ConfigurationError as error:
            self.notes.append(f"the largest batch is on a line through two smaller ones: at a larger batch, {error}")
            return largest_batch(run, engine, self.memory)
        if not confirmed and largest is not None:
            self.notes.append("a larger batch than the largest that is named may fit: memory grows unevenly with it")
        return largest

    def _as_fake(self, value: Any) -> Any:
        return fake_tensors.as_fake(value, self.inputs.mode) if isinstance(value, Tensor) else value

    def _step(self, strategy: ShardStrategy, checkpointing: Checkpointing) -> Step:
        units = strategy.engine_for(self.module).units(self.module)
        return Step(training_step=self._loss, batch=self.batch, units=units, checkpointing=checkpointing)

    def _time(self, run: Run, sent: Sequence[Any]) -> StepTime | None:
        options = self.options
        if run.traces is None or options.peak is None:
            return None
        flops = run.traces.one.flops * run.micro_batches
        return step_time(
            sent,
            self.nodes,
            flops=flops,
            peak=options.peak * options.efficiency,
            inside=options.intra_node,
            between=options.inter_node,
        )


def _of_size(batch: Any, size: int) -> Any:
    """A batch of another size: repeated, then cut."""
    own = batch_size_of(batch)
    larger, _ = scaled(batch, -(-size // own))
    return tree_map(
        lambda t: t[:size] if isinstance(t, Tensor) and t.ndim and t.shape[0] == own * -(-size // own) else t, larger
    )


def _traced(inputs: Inputs, groups: Sequence[Mapping[str, Any]]) -> OptimizerFacts:
    """The state of the optimizer that steps masters, made anew over them."""
    before = [(module, dict(module._parameters)) for module in inputs.module.modules()]
    try:
        with inputs.mode:
            cast_trainable_parameters(inputs.module, inputs.strategy.policy.master)
        optimizer = plan_inputs.optimizer_of(inputs)
        for group in optimizer.param_groups:
            # As on GPUs, where torch's optimizers step all tensors at once.
            if "foreach" in group and not group["foreach"] and not group.get("fused"):
                group["foreach"] = group["foreach"] is None
        return trace_optimizer(inputs.module, optimizer, inputs.mode)
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)
