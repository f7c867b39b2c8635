"""The planner's memory and step times against runs that others have published: a table, and a picture.

``python -m examples.benchmarks.published`` needs no GPU and takes some minutes of a core.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks import published_report, report
from examples.benchmarks.published_runs import HUGGING_FACE, TORCHTITAN, Published
from examples.benchmarks.published_tables import FMS_FSDP, LLM_FOUNDRY, TORCHTITAN_A100
from lightning_shard.engines.units import find_units
from lightning_shard.meters.peaks import find_peaks
from lightning_shard.planning.device_memory import device_memory, replay, verdict
from lightning_shard.planning.memory_trace import Step, Trace, trace_step
from lightning_shard.planning.model_facts import OptimizerFacts, Training, model_facts
from lightning_shard.planning.operators import Device
from lightning_shard.planning.planner import Run, confirmed_batch
from lightning_shard.planning.predict import start_points, step_points
from lightning_shard.planning.step_memory import peak
from lightning_shard.planning.step_time import LINK_REACHED, Rates, device_of, step_time
from lightning_shard.tensors import fake

GIB = 2**30
LINKS = {
    "H100": (450e9, 8 * 50e9),
    "A100": (300e9, 8 * 25e9),
    "A100 40GB": (300e9, 8 * 25e9),
    "Titan RTX": (16e9, 16e9),
}
"""Bytes per second of a device inside its node, and of a node of eight to others, as the sources have them."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The plan of a published run, in GiB and samples."""

    tensors: float
    expandable: float  # That the allocator reserves with expandable segments.
    default: float  # And without.
    bounds: tuple[float, float]  # Of all that the device holds.
    largest: tuple[int, int] | None = None  # The largest batch that fits at most of the range, and at least.
    step: float | None = None  # Seconds.


class Model:
    """A published run's model without data, its facts, and traces of its step, which like runs share."""

    def __init__(self, run: Published) -> None:
        self.mode = fake.fake_mode()
        with self.mode:
            self.module = run.model()
        fake.make_fake(self.module, self.mode)
        self.units = find_units(self.module, run.units if run.units == "auto" else list(run.units))
        self._traces: dict[str, Trace] = {}

    def trace(self, run: Published, batch: int, device: Device | None = None) -> Trace:
        key = repr((run.policy.compute, run.policy.autocast, batch, device))
        if key not in self._traces:
            tokens = torch.zeros(batch, run.length, dtype=torch.long)
            step = Step(training_step=self.module.loss, batch=tokens, units=self.units, device=device)
            self._traces[key] = trace_step(self.module, step, run.policy, self.mode)
        return self._traces[key]

    def training(self, run: Published) -> Training:
        found = model_facts(self.module, units=self.units)
        rules = {self.units[index].name: again for index, again in run.unit_rules.items()}
        parameters = tuple(replace(p, reshard=rules.get(p.unit, p.reshard)) for p in found.parameters)
        model = replace(found, parameters=parameters)
        return Training(model=model, policy=run.policy, optimizer=OptimizerFacts(), micro_batches=run.micro_batches)


_models: dict[str, Model] = {}


def model_of(run: Published) -> Model:
    key = repr((run.model, run.length, run.units))
    if key not in _models:
        _models[key] = Model(run)
    return _models[key]


def device_of_run(run: Published) -> Device | None:
    """The rates of its device. None: the run has no time, or the device no known peaks."""
    peaks = find_peaks(run.device)
    if run.tokens is None or peaks is None:
        return None
    peaks = replace(peaks, memory=run.bandwidth or peaks.memory)
    device = device_of(peaks, 1e12 * peaks.half)
    return replace(device, attention=device.attention / run.attention)


def predict(run: Published) -> Predicted:
    """Plan the published batch, and the largest batch if that was published."""
    model = model_of(run)
    device = device_of_run(run)
    training, trace = model.training(run), model.trace(run, run.largest or run.batch, device)
    points = step_points(training, run.engine, trace)
    if run.whole_units:
        points = [*start_points(training, run.engine), *points]
    expandable, default = (replay(points, trace, training, expandable=e) / GIB for e in (True, False))
    tensors = peak(points).account.device.total / GIB
    largest = None if run.largest is None else largest_batches(run, model, training)
    step = None if device is None else seconds(run, training, trace, device)
    needs = device_memory(points, training, run.engine, trace)
    bounds = needs.bounds[0] / GIB, needs.bounds[1] / GIB
    return Predicted(tensors=tensors, expandable=expandable, default=default, bounds=bounds, largest=largest, step=step)


def largest_batches(run: Published, model: Model, training: Training) -> tuple[int, int]:
    """The largest batch that fits, and the one that may."""
    assert run.memory is not None
    found = Run(training=training, engine=run.engine, traces=(model.trace(run, 2), model.trace(run, 4)))
    return confirmed_batch(found, int(run.memory * GIB), lambda batch: model.trace(run, batch)) or (0, 0)


def seconds(run: Published, training: Training, trace: Trace, device: Device) -> float:
    """Of a step, by the planner's schedule, over links as in its nodes."""
    inside, between = LINKS[run.device]
    between = run.between or between
    rates = Rates(device=device, nodes=run.nodes, inside=inside * LINK_REACHED, between=between * LINK_REACHED)
    return step_time(training, run.engine, trace, rates, compiled=run.compiled).expected


def row_of(run: Published) -> report.Row:
    """One line of the table: the published and the predicted value."""
    found = predict(run)
    row: dict[str, Any] = {"run": run.name, "half": run.half, "source": run.source, "batch": run.largest or run.batch}
    row |= {"series": run.series, "length": run.length, "device": run.device, "gpus": run.nodes.ranks}
    kept = getattr(run.engine, "reshard_after_forward", None)
    model = run.model.keywords if isinstance(run.model, partial) else {}
    row["setting"] = (
        f"{model.get('recompute')} {model.get('share')} {model.get('chunks')} {run.compiled} {run.unit_rules} {kept}"
    )
    if run.reserved is not None:
        ends = sorted((found.expandable, found.default))
        own = found.expandable if run.expandable else found.default
        row |= {"published": run.reserved, "low": ends[0], "predicted": own, "high": ends[1], "unit": "GiB"}
    elif found.largest is not None:
        safe, least = found.largest
        # "Fits" means the upper end of the range.
        row |= {"published": run.largest, "low": safe, "predicted": safe, "high": least, "unit": "samples"}
    elif run.memory is not None:
        low, high = found.bounds
        row |= {"low": low, "high": high, "fits": verdict((low, high), run.memory)}
    if run.tensors is not None:
        row |= {"tensors": run.tensors, "tensors_predicted": found.tensors}
    if found.step is not None:
        assert run.tokens is not None
        published = run.micro_batches * run.batch * run.length / run.tokens
        row |= {"tokens": run.tokens, "step": published, "step_predicted": found.step}
        row["step_ratio"] = found.step / published
    if "published" in row:
        row["ratio"] = row["predicted"] / row["published"]
    far = abs(row.get("ratio", 1) - 1) > 0.1 or abs(row.get("step_ratio", 1) - 1) > 0.2
    return {**row, "why": run.why if far else ""}


TABLES = {
    "torchtitan": (*TORCHTITAN, *TORCHTITAN_A100),
    "hugging-face": HUGGING_FACE,
    "fms-fsdp": FMS_FSDP,
    "llm-foundry": LLM_FOUNDRY,
}
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
    parser.add_argument("--table", choices=TABLES, action="append", help="publications to read (default: all)")
    parser.add_argument("--only", default="", help="runs whose name has this text")
    options = parser.parse_args()
    rows = []
    for table in options.table or TABLES:
        for run in (run for run in TABLES[table] if options.only in run.name):
            rows.append({"table": table, **row_of(run)})
            print(report.table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    report.write_csv(rows, options.output / "published.csv")
    print(report.table(published_report.spread(rows), published_report.SPREAD))
    kinds, wrong = published_report.orders(rows)
    print(report.table(kinds, published_report.ORDERS))
    print(report.table(wrong, published_report.WRONG))
    published_report.draw(rows, options.output / "published.png")


if __name__ == "__main__":
    main()
