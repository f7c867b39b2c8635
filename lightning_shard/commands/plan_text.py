"""The parts of ``lightning-shard plan``, in order: read, trace, add up, compare, recommend, write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from lightning_shard import registry
from lightning_shard.commands import plan_inputs
from lightning_shard.commands.plan_advice import recommendation
from lightning_shard.commands.plan_inputs import Inputs
from lightning_shard.commands.plan_run import Planner
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.peaks import peak_flops
from lightning_shard.planning import picture, report
from lightning_shard.planning.memory_trace import batch_size_of
from lightning_shard.planning.quantities import show_bytes
from lightning_shard.planning.report import FORMS, Row
from lightning_shard.planning.step_points import peak
from lightning_shard.planning.traffic import Nodes
from lightning_shard.registry import ALIGNED_SUFFIX, PRESETS

RESERVE = 0.05
"""The part of a device's memory that is left to the CUDA context, libraries and fragmentation by default."""


def plan(options: argparse.Namespace, rest: Sequence[str]) -> str:
    """The whole text."""
    reserve = options.reserve if options.reserve is not None else int(options.device_memory * RESERVE)
    inputs = plan_inputs.read(rest, nodes=options.nodes, devices=options.devices)
    nodes = inputs.nodes
    planner = Planner(inputs=inputs, nodes=nodes, options=options, memory=options.device_memory - reserve)
    options.peak = _peak(options, inputs)
    take_links(options, nodes)
    planner.prepare()
    own = inputs.strategy.activation_checkpointing
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
    """All engines of the package in the configured contract, each with every form of activation checkpointing."""
    rows = []
    aligned = planner.inputs.strategy.aligned
    for name, preset in PRESETS.items():
        if (preset.init_args.get("aligned", False)) != aligned:
            continue
        strategy = registry.build(name)
        try:
            strategy.precision_plugin = planner.inputs.strategy.precision_plugin
            strategy.engine_for(planner.module).check(planner.planned_run(strategy, planner.nodes))
        except ConfigurationError as error:
            rows.append(Row(name=name, refused=str(error)))
            continue
        for checkpointing in FORMS:
            if checkpointing is not None and not strategy.engine_for(planner.module).units(planner.module):
                continue
            rows.append(planner.row(name, strategy, checkpointing))
    return rows


def _hybrid(planner: Planner, row: Row) -> list[str]:
    """What hybrid sharding would change, where the links between nodes are what the step waits for."""
    strategy, nodes = planner.inputs.strategy, planner.nodes
    engine = planner.engine(strategy, nodes)
    slow = row.time is not None and row.time.bound == "the links between nodes"
    if not slow or not engine.can_become_hybrid or nodes.nodes == 1 or nodes.devices == 1:
        return []
    name = "shard_fsdp_hybrid" + (ALIGNED_SUFFIX if strategy.aligned else "")
    other = registry.build(name)
    other.precision_plugin = strategy.precision_plugin
    hybrid = planner.row(name, other, strategy.activation_checkpointing)
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
