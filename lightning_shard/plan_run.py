"""The parts of ``lightning-shard plan``, in order: read, trace, add up, compare, recommend, write."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_shard import plan_inputs, registry
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.meters.peaks import peak_flops
from lightning_shard.plan_advice import recommendation
from lightning_shard.plan_inputs import Inputs
from lightning_shard.planning import fake, picture, report
from lightning_shard.planning.facts import Engine, ModelFacts, OptimizerFacts, Shards
from lightning_shard.planning.fitting import Run, Traces, confirmed_batch, fewest_devices, largest_batch
from lightning_shard.planning.quantities import show_bytes
from lightning_shard.planning.report import Row
from lightning_shard.planning.trace import Step, Trace, batch_size_of, scaled, trace_step
from lightning_shard.planning.trace_optimizer import trace_optimizer
from lightning_shard.planning.traffic import Nodes, StepTime, collectives, step_time
from lightning_shard.planning.walk import peak
from lightning_shard.precision.casting import cast_trainable_parameters
from lightning_shard.registry import ALIGNED_SUFFIX, PRESETS
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.planned import check_precision, checkpointing_of, engine_of, facts_of, units_of

UNITS: Checkpointing = "units"

RESERVE = 0.05
"""The part of a device's memory that is left to the CUDA context, libraries and fragmentation by default."""


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
        return facts_of(strategy, self.module, groups=self.groups)

    def _traces(self, strategy: ShardStrategy, checkpointing: Checkpointing) -> Traces | None:
        units = units_of(strategy, self.module)
        key = repr((checkpointing, [unit.names for unit in units], strategy.policy))
        if key not in self.traces and self.batch is not None:
            step = self._step(strategy, checkpointing)
            with fake.fake_world(self.nodes.ranks):
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

    def engine(self, strategy: ShardStrategy, nodes: Nodes) -> Engine:
        """The engine of ``strategy`` on some machines."""
        return engine_of(
            strategy,
            self.module,
            ranks=nodes.ranks,
            per_node=nodes.devices,
            accumulate_grad_batches=self.inputs.micro_batches,
            optimizer=None if self.optimizer_name is None else {"type": self.optimizer_name},
        )

    def row(self, name: str, strategy: ShardStrategy, checkpointing: Checkpointing, *, confirm: bool = False) -> Row:
        """A line of the comparison; ``confirm``: the largest batch is traced, and not found on a line alone."""
        marked = checkpointing is not None
        try:
            engine = self.engine(strategy, self.nodes)
        except ConfigurationError as error:
            return Row(name=name, checkpointing=marked, refused=str(error))
        run = self.run(strategy, checkpointing)
        if run.traces is None and any(self.traces.values()):
            return Row(name=name, checkpointing=marked, refused=next(iter(self.failed.values())))

        def engine_on(nodes: Nodes) -> Engine | None:
            try:
                return self.engine(strategy, nodes)
            except ConfigurationError:
                return None

        largest = self._confirmed(run, strategy, checkpointing, engine) if confirm else None
        sent = collectives(run.model, engine, run.policy, micro_batches=run.micro_batches)
        return Row(
            name=name,
            checkpointing=marked,
            points=tuple(run.points(engine)),
            largest_batch=largest if confirm else largest_batch(run, engine, self.memory),
            fewest=fewest_devices(run, engine_on, self.nodes.devices, self.memory),
            sent=tuple(sent),
            time=self._time(run, sent),
        )

    def _confirmed(self, run: Run, strategy: ShardStrategy, checkpointing: Checkpointing, engine: Engine) -> int | None:
        def trace_at(size: int) -> Trace:
            with self.inputs.mode:
                batch = _of_size(tree_map(self._as_fake, self.batch), size)
            step = replace(self._step(strategy, checkpointing), batch=batch)
            with fake.fake_world(self.nodes.ranks):
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
        return fake.as_fake(value, self.inputs.mode) if isinstance(value, Tensor) else value

    def _step(self, strategy: ShardStrategy, checkpointing: Checkpointing) -> Step:
        units = units_of(strategy, self.module)
        return Step(loss=self._loss, batch=self.batch, units=units, checkpointing=checkpointing)

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


def plan(options: argparse.Namespace, rest: Sequence[str]) -> str:
    """The whole text."""
    reserve = options.reserve if options.reserve is not None else int(options.device_memory * RESERVE)
    inputs = plan_inputs.read(rest, nodes=options.nodes, devices=options.devices)
    nodes = inputs.nodes
    planner = Planner(inputs=inputs, nodes=nodes, options=options, memory=options.device_memory - reserve)
    options.peak = _peak(options, inputs)
    take_links(options, nodes)
    planner.prepare()
    own = checkpointing_of(inputs.strategy)
    configured = planner.row(inputs.name, inputs.strategy, own, confirm=True)
    if configured.refused:
        raise ConfigurationError(configured.refused)
    rows = [replace(configured, name="as configured"), *(_others(planner) if options.compare else [])]
    parts = [_title(planner, configured), report.by_kind(configured.points), _fit(planner, configured)]
    parts.append(report.traffic(configured.sent, nodes))
    parts += [report.timing(configured.time)] if configured.time else []
    parts += _hybrid(planner, configured)
    if options.compare:
        parts.append(report.comparison(rows, planner.memory))
        precision = None if inputs.trainer.get("plugins") else inputs.strategy.precision_plugin.precision
        parts.append(recommendation(rows[1:], memory=planner.memory, nodes=nodes, precision=precision))
    if options.picture is not None:
        picture.draw([row for row in rows if not row.refused], planner.memory, options.picture)
        parts.append(f"picture: {options.picture}")
    notes = [f"note: {note}" for note in dict.fromkeys(planner.notes)]
    return "\n\n".join([*notes, *parts])


def _peak(options: argparse.Namespace, inputs: Inputs) -> float | None:
    if options.device_name is None:
        return options.device_peak
    found = peak_flops(options.device_name, inputs.strategy.policy.compute)
    if found is None:
        raise ConfigurationError(
            f"the peak of {options.device_name!r} is not known here. Give it: --device-peak 989TFLOPS."
        )
    return found


def take_links(options: argparse.Namespace, nodes: Nodes) -> None:
    """Take the speeds of links that doctor measured.

    Raises:
        ConfigurationError: links of the run's kind were not measured.
    """
    found = options.measured
    if found is None:
        return
    for speed, crossed, where in (
        (found.intra_node, nodes.devices > 1, "inside a node"),
        (found.inter_node, nodes.nodes > 1, "between nodes"),
    ):
        if crossed and speed is None:
            raise ConfigurationError(
                f"--links {options.links} has no link {where}, and the run is on {nodes.nodes} x {nodes.devices} "
                "devices. Run doctor on as many nodes and ranks, or give --intra-node and --inter-node."
            )
    options.intra_node, options.inter_node = found.intra_node, found.inter_node


def _title(planner: Planner, row: Row) -> str:
    nodes, inputs = planner.nodes, planner.inputs
    precision = inputs.strategy.precision_plugin.precision
    model = planner.facts(inputs.strategy)
    batch = "" if planner.batch is None else f", batch {batch_size_of(planner.batch)} per device"
    if inputs.micro_batches > 1:
        batch += f" x {inputs.micro_batches} accumulated"
    return (
        f"{row.title}, {precision}, {nodes.nodes} x {nodes.devices} devices{batch}: {model.numel:,} parameters, "
        f"{show_bytes(planner.memory)} per device to use"
    )


def _fit(planner: Planner, row: Row) -> str:
    at = peak(row.points)
    total = at.account.device.total
    verdict = "fits" if total <= planner.memory else "does not fit"
    lines = [f"{verdict}: {show_bytes(total)} at the peak, in the {at.name}, of {show_bytes(planner.memory)}"]
    if row.largest_batch is not None:
        lines.append(f"largest batch per device: {row.largest_batch or 'none: not even 1 fits'}")
    fewest = row.fewest
    lines.append(
        "fewest devices for this batch: "
        + ("no number of them is enough" if fewest is None else f"{fewest.nodes} x {fewest.devices}")
    )
    return "\n".join(lines)


def _others(planner: Planner) -> list[Row]:
    """All engines of the package in the configured contract, each with and without activation checkpointing."""
    rows = []
    aligned = planner.inputs.strategy.aligned
    for name, preset in PRESETS.items():
        if (preset.init_args.get("aligned", False)) != aligned:
            continue
        strategy = registry.build(name)
        try:
            strategy.precision_plugin = planner.inputs.strategy.precision_plugin
            check_precision(strategy)
        except ConfigurationError as error:
            rows.append(Row(name=name, checkpointing=False, refused=str(error)))
            continue
        for checkpointing in (None, UNITS):
            if checkpointing is not None and not _has_units(planner, strategy):
                continue
            rows.append(planner.row(name, strategy, checkpointing))
    return rows


def _has_units(planner: Planner, strategy: ShardStrategy) -> bool:
    """Whether the strategy can checkpoint by units."""
    takes = "activation_checkpointing" in inspect.signature(type(strategy)).parameters
    return takes and bool(units_of(strategy, planner.module))


def _hybrid(planner: Planner, row: Row) -> list[str]:
    """What hybrid sharding would change, where the links between nodes are what the step waits for."""
    strategy, nodes = planner.inputs.strategy, planner.nodes
    engine = planner.engine(strategy, nodes)
    slow = row.time is not None and row.time.bound == "the links between nodes"
    if not slow or not isinstance(engine, Shards) or engine.replicate > 1 or nodes.nodes == 1 or nodes.devices == 1:
        return []
    name = "shard_fsdp_hybrid" + (ALIGNED_SUFFIX if strategy.aligned else "")
    other = registry.build(name)
    other.precision_plugin = strategy.precision_plugin
    hybrid = planner.row(name, other, checkpointing_of(strategy))
    assert hybrid.time is not None
    assert row.time is not None
    before = sum(c.between(nodes) for c in row.sent)
    after = sum(c.between(nodes) for c in hybrid.sent)
    verdict = "fits" if hybrid.most.device.total <= planner.memory else "does not fit"
    return [
        f"hybrid sharding ({name}) would send {show_bytes(after)} between nodes in place of {show_bytes(before)} per "
        f"node, and a step would take about {report.show_seconds(hybrid.time.expected)} in place of "
        f"{report.show_seconds(row.time.expected)}; its peak of {show_bytes(hybrid.most.device.total)} {verdict}"
    ]
