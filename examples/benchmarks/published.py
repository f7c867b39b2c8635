"""The planner's memory and step times against runs that others have published: a table, and a picture.

``python -m examples.benchmarks.published`` needs no GPU and takes some minutes of a core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks import report
from examples.benchmarks.published_runs import RUNS, Published
from lightning_shard.engines.units import find_units
from lightning_shard.meters.peaks import find_peaks
from lightning_shard.planning.device_memory import replay
from lightning_shard.planning.facts import OptimizerFacts, Training, model_facts
from lightning_shard.planning.memory_trace import Step, Trace, trace_step
from lightning_shard.planning.operators import Device
from lightning_shard.planning.planner import Run, confirmed_batch
from lightning_shard.planning.predict import start_points, step_points
from lightning_shard.planning.step_memory import peak
from lightning_shard.planning.step_time import LINK_REACHED, Rates, device_of, step_time
from lightning_shard.tensors import fake

GIB = 2**30
LINKS = {"H100": (450e9, 8 * 50e9), "A100": (300e9, 8 * 25e9), "Titan RTX": (16e9, 16e9)}
"""Bytes per second of a device inside its node, and of a node of eight to others, as the sources have them."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the planner says of a published run; GiB and samples."""

    tensors: float
    expandable: float  # That the allocator reserves with expandable segments.
    default: float  # And without.
    largest: tuple[int, int] | None = None  # The largest batch that fits at most of the range, and at least.
    step: float | None = None  # Seconds.


class Model:
    """A published run's model without data, its facts, and traces of its step."""

    def __init__(self, run: Published) -> None:
        self.run, self.mode = run, fake.fake_mode()
        with self.mode:
            self.module = run.model()
        fake.make_fake(self.module, self.mode)
        self.units = find_units(self.module, run.units if run.units == "auto" else list(run.units))

    def trace(self, batch: int, device: Device | None = None) -> Trace:
        tokens = torch.zeros(batch, self.run.length, dtype=torch.long)
        step = Step(training_step=self.module.loss, batch=tokens, units=self.units, device=device)
        return trace_step(self.module, step, self.run.policy, self.mode)

    def training(self) -> Training:
        found = model_facts(self.module, units=self.units)
        rules = {self.units[index].names[0]: again for index, again in self.run.unit_rules.items()}
        parameters = tuple(replace(p, reshard=rules.get(p.unit, p.reshard)) for p in found.parameters)
        return Training(model=replace(found, parameters=parameters), policy=self.run.policy, optimizer=OptimizerFacts())


def predict(run: Published) -> Predicted:
    """At the published batch, and the largest batch where that is what was published."""
    model = Model(run)
    device = None
    if run.tokens is not None and (peaks := find_peaks(run.device)) is not None:
        device = device_of(peaks, 1e12 * peaks.half)
    training, trace = model.training(), model.trace(run.largest or run.batch, device)
    points = step_points(training, run.engine, trace)
    if run.whole_units:
        points = [*start_points(training, run.engine), *points]
    expandable, default = (replay(points, trace, training, expandable=e) / GIB for e in (True, False))
    tensors = peak(points).account.device.total / GIB
    largest = None if run.largest is None else largest_batches(run, model, training)
    step = None if device is None else seconds(run, training, trace, device)
    return Predicted(tensors=tensors, expandable=expandable, default=default, largest=largest, step=step)


def largest_batches(run: Published, model: Model, training: Training) -> tuple[int, int]:
    """The largest batch that fits at most, and the one that fits at least."""
    assert run.memory is not None
    memory = int(run.memory * GIB)
    traces = (model.trace(2), model.trace(4))
    found = Run(training=training, engine=run.engine, traces=traces)
    # Without the allocator's blocks, and with the least of what lies outside of them.
    least = replace(found, traces=tuple(replace(trace, events=()) for trace in traces))
    more = memory + least.needs.high - least.needs.low
    low = confirmed_batch(least, more, lambda batch: replace(model.trace(batch), events=()))
    return confirmed_batch(found, memory, model.trace) or 0, low or 0


def seconds(run: Published, training: Training, trace: Trace, device: Device) -> float:
    """Of a step, by the planner's schedule, over links as in its nodes."""
    inside, between = LINKS[run.device]
    rates = Rates(device=device, nodes=run.nodes, inside=inside * LINK_REACHED, between=between * LINK_REACHED)
    return step_time(training, run.engine, trace, rates, compiled=run.compiled).expected


def row_of(run: Published) -> report.Row:
    """One line of the table: what was published, and beside it what is predicted."""
    found = predict(run)
    ends = sorted((found.expandable, found.default))
    row: dict[str, Any] = {"run": run.name, "half": run.half, "source": run.source, "batch": run.largest or run.batch}
    if run.reserved is not None:
        own = found.expandable if run.expandable else found.default
        row |= {"published": run.reserved, "low": ends[0], "predicted": own, "high": ends[1], "unit": "GiB"}
    elif found.largest is not None:
        safe, least = found.largest
        # "Fits" is said of what fits at most.
        row |= {"published": run.largest, "low": safe, "predicted": safe, "high": least, "unit": "samples"}
    row["ratio"] = row["predicted"] / row["published"]
    if run.tensors is not None:
        row |= {"tensors": run.tensors, "tensors_predicted": found.tensors}
    if found.step is not None:
        assert run.tokens is not None
        published = run.batch * run.length / run.tokens
        row |= {"step": published, "step_predicted": found.step, "step_ratio": found.step / published}
    far = abs(row["ratio"] - 1) > 0.1
    return {**row, "why": run.why if far else ""}


def draw(rows: Sequence[report.Row], path: Path) -> None:
    """Predicted against published: GiB reserved, and largest batches; readable at 830 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8.3, 4.3))
    for axis, (unit, title) in zip(axes, TITLES.items(), strict=True):
        mine = [row for row in rows if row["unit"] == unit]
        ends = [0.9 * min(row["published"] for row in mine), 1.1 * max(row["published"] for row in mine)]
        axis.plot(ends, ends, color="black", linewidth=0.8, label="as published")
        axis.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], alpha=0.15, label="within 10 %")
        for half, marker in (("fitted", "s"), ("judged", "o")):
            own = [row for row in mine if row["half"] == half]
            x, y = [row["published"] for row in own], [row["predicted"] for row in own]
            ends_of = [(r["predicted"] - r["low"], r["high"] - r["predicted"]) for r in own]
            errors = [[below for below, _ in ends_of], [above for _, above in ends_of]]
            axis.errorbar(x, y, yerr=errors, fmt=marker, markersize=5, elinewidth=0.9, label=f"{half} half")
        axis.set(xscale="log", yscale="log", xlabel=f"published {title}", ylabel=f"predicted {title}")
        ticks = TICKS[unit]
        for one in (axis.xaxis, axis.yaxis):
            one.set_ticks(ticks, [str(t) for t in ticks])
            one.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


TITLES = {"GiB": "GiB reserved", "samples": "largest batch"}
TICKS = {"GiB": [7, 15, 30, 60, 90], "samples": [5, 10, 20, 50, 100, 200]}
COLUMNS = {
    "run": "run",
    "half": "half",
    "unit": "of",
    "published": "published",
    "predicted": "predicted",
    "ratio": "ratio",
    "low": "least",
    "high": "most",
    "tensors": "tensors published",
    "tensors_predicted": "predicted",
    "step_ratio": "step, ratio",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of the table and picture")
    parser.add_argument("--only", default="", help="runs whose name has this text")
    options = parser.parse_args()
    rows = []
    for run in (run for run in RUNS if options.only in run.name):
        rows.append(row_of(run))
        print(report.table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    print(report.table(rows, COLUMNS))
    report.write_csv(rows, options.output / "published.csv")
    if {row["unit"] for row in rows} == set(TITLES):
        draw(rows, options.output / "published.png")


if __name__ == "__main__":
    main()
