"""The fastest forms of a run that keep its global batch and fit, out of engines, batches and compilation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_shard.errors import ConfigurationError
from lightning_shard.planning.planner import Candidate, Planner, largest_batch
from lightning_shard.planning.report import FORMS
from lightning_shard.planning.step_time import StepTime
from lightning_shard.text import columns, show_bytes, show_seconds

BATCHES = 3
"""Micro-batches whose time is looked at, the largest that fit: smaller ones send as much for fewer samples."""


@dataclass(frozen=True, kw_only=True)
class Form:
    name: str  # The strategy's.
    init_args: Mapping[str, Any] = field(default_factory=dict)  # Beside those of the name.
    batch: int  # Samples per device and micro-batch.
    micro_batches: int
    time: StepTime
    device: int  # At most so many bytes of a device.

    @property
    def cost(self) -> tuple[Any, ...]:
        """By which forms are compared: what does not differ in time is the simpler one."""
        form = FORMS.index(self.init_args.get("activation_checkpointing"))
        return round(self.time.expected, 5), form, len(self.init_args), self.micro_batches, self.device >> 20

    @property
    def cells(self) -> list[str]:
        settings = ", ".join(f"{key}: {value}" for key, value in self.init_args.items())
        shown = [show_seconds(self.time.expected), self.time.bound, show_bytes(self.device)]
        return [self.name, settings or "-", str(self.batch), str(self.micro_batches), *shown]


def forms(planner: Planner, candidate: Candidate, samples: int, *, compiles: bool) -> Iterator[Form]:
    """A candidate with the micro-batches that fit, which ``samples`` per device and step divide into.

    ``compiles``: whether its units can be compiled. Nothing: it can't run, or not even one sample fits.
    """
    try:
        run = planner.run(candidate)
    except ConfigurationError:
        return
    largest = min(largest_batch(run, planner.memory) or 0, samples)
    for batch in [batch for batch in range(largest, 0, -1) if samples % batch == 0][:BATCHES]:
        count = samples // batch
        own = replace(run, training=replace(run.training, micro_batches=count))
        device = run.needs.at(own.tensors(batch))
        for compiled in (False, True) if compiles else (False,):
            time = planner.time(own, compiled=compiled, batch=batch)
            if time is not None and device <= planner.memory:
                given = {**candidate.init_args, **({"compile": True} if compiled else {})}
                name = candidate.name
                yield Form(name=name, init_args=given, batch=batch, micro_batches=count, time=time, device=device)


def ranked(found: Iterable[Form]) -> list[Form]:
    """The best form of each name, the fastest first."""
    best: dict[str, Form] = {}
    for form in sorted(found, key=lambda form: form.cost):
        best.setdefault(form.name, form)
    return list(best.values())


def table(rows: Sequence[Form]) -> str:
    head = ["strategy", "with", "batch", "accumulated", "step", "bound by", "device at most"]
    return columns([head, *(form.cells for form in rows)], numbers=True)
