r"""One page on how this package does on a machine's GPUs: is it right, is it fast, is the plan true.

    python -m examples.benchmarks.gpu_report                       # all GPUs of this machine, within 30 minutes
    python -m examples.benchmarks.gpu_report --sizes 1B --parts check speed
    python -m examples.benchmarks.gpu_report --device cpu --sizes tiny --seq-len 16 --peak-tflops 0.1

Parts run in order of importance until the time is up. The page is rewritten after each, and lists parts that were left
out. They are the checks of ``lightning-shard selftest``, the races of ``examples.benchmarks.engines`` at each size that
fits by the plan, and the peak memory of each engine against its plan. The exit code is 1 if a check failed, or a
contestant's losses were not the reference's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks import engines, report
from examples.benchmarks.llama import SIZES
from examples.benchmarks.processes import MEBIBYTE, Failed, Place, free_memory, run_processes
from examples.benchmarks.races import contestants, say
from examples.benchmarks.trainers import ACCELERATORS, Task
from examples.benchmarks.workload import DEVICES, Batch, Workload, describe, parameters_of, with_weights, workload_of
from lightning_shard import devices, tools
from lightning_shard.commands import selftest
from lightning_shard.errors import ShardError
from lightning_shard.planning.report import Row

PARTS = ("check", "speed", "memory")
LEAST_SECONDS = 30.0
"""With less left no part is started: imports and a model's values take that long."""
USABLE = 0.9
"""Of a memory: the rest is the CUDA context, libraries, fragmentation, other processes of the host."""
FIRST = ("fsdp", "stage_3", "ddp", "stage_2")
"""The races at every size."""
FURTHER = ("fsdp_grad_op", "fsdp_hybrid", "stage_1", "fsdp_offload", "stage_2_offload", "stage_3_offload")
"""At the first size, and last."""
FORMS: Mapping[str, Mapping[str, Any]] = {
    "compiled, selective": {"compile": True, "checkpointing": "selective"},
    "compiled": {"compile": True},
    "selective": {"checkpointing": "selective"},
}
"""Forms of the race "fsdp", besides its plain one."""
SPEED = {
    "contestant": "",
    "ms": "ms/step",
    "tokens": "tokens/s/device",
    "mfu": "MFU",
    "ratio": "of the first",
    "ratios": "95 % of it",
    "other": "fastest other",
    "other_ratio": "of it",
    "loss": "loss differs by",
}
MEMORY = {"race": "", "planned": "planned MiB", "memory": "measured MiB", "part": "measured / planned"}


class Planned(Task):
    """The benchmarks' task as a configuration names it, for ``lightning-shard plan`` without data."""

    def __init__(self, size: str, seq_len: int, batch_size: int) -> None:
        """Build the model, and batches of nothing but zeros."""
        work = Workload(size=SIZES[size], seq_len=seq_len, batch_size=batch_size)
        super().__init__(work, Place(rank=0, device=torch.device("cpu")), plain=True)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Inputs and targets, int64 (batch_size, seq_len) each."""
        tokens = torch.zeros(self.work.batch_size, self.work.seq_len, dtype=torch.int64)
        return DataLoader(TensorDataset(tokens, tokens), self.work.batch_size)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices and memory that the runs may use."""

    device: str
    processes: int
    memory: int
    """Bytes of a device."""
    host: int
    """Bytes of the host that are free."""
    folder: Path = Path()
    """Folder of files with a model's values, shared by all processes."""


@dataclass(kw_only=True)
class Findings:
    """The results so far."""

    title: str
    sections: list[tuple[str, str]] = field(default_factory=list)
    """Headings and Markdown."""
    speed: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the report. ``run`` takes the moment of ``time.monotonic`` at which its processes are ended."""

    title: str
    run: Callable[[Findings, float], None]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=DEVICES, default=DEVICES[-1])
    add("--processes", type=int, help="default: all GPUs, 2 on CPUs")
    add("--sizes", nargs="+", choices=list(SIZES), default=["1B", "3B", "8B"], metavar="SIZE")
    add("--seq-len", type=int, default=4096)
    add("--batch-size", type=int, default=1, help="sequences in a batch of one process")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    add("--races", nargs="+", choices=[*FIRST, *FURTHER], default=[*FIRST, *FURTHER], metavar="RACE")
    add("--forms", nargs="*", choices=list(FORMS), default=list(FORMS), metavar="FORM", help="; ".join(FORMS))
    add("--rounds", type=int, default=6, help="blocks of each contestant")
    add("--steps", type=int, default=5, help="steps in a block")
    add("--peak-tflops", type=float, help="of a device, for MFU (default: by its name, if known)")
    add("--minutes", type=float, default=29.0, help="when they are over, nothing is started and runs are ended")
    add("--output", type=Path, default=Path("runs/gpu_report"))
    return parser.parse_args(arguments)


def machine_of(options: argparse.Namespace, folder: Path = Path()) -> Machine:
    """This machine. Each process has its share of a CPU's memory."""
    host = free_memory()
    if options.device == "cpu":
        processes = options.processes or 2
        return Machine(device="cpu", processes=processes, memory=host // processes, host=host, folder=folder)
    if not (count := devices.visible()):
        raise SystemExit("torch sees no GPU here: `--device cpu --sizes tiny --seq-len 16` tries the report itself")
    memory = min(torch.accelerator.get_memory_info(index)[1] for index in range(count))
    processes = options.processes or count
    return Machine(device=options.device, processes=processes, memory=memory, host=host, folder=folder)


# Right


def checked(place: Place, precision: str, folder: str) -> tuple[int, str]:
    """The exit code of ``lightning-shard selftest`` in these processes, and its output."""
    printed = io.StringIO()
    accelerator = ACCELERATORS.get(place.device.type, "cpu")
    with contextlib.redirect_stdout(printed):
        arguments = ["--precision", precision, "--accelerator", accelerator, "--folder", folder]
        code = selftest.main(arguments, os.environ)
    return code, printed.getvalue()


def check(machine: Machine, precision: str) -> Part:
    """Whether the engines agree, save, resume and switch."""
    title = f"Do the engines agree in {precision}?"

    def run(found: Findings, until: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            place = {"processes": machine.processes, "device": machine.device}
            arguments = (precision, f"{folder}/runs")
            ranks = run_processes(checked, *arguments, timeout=until - time.monotonic(), **place)
        code, printed = ranks[0]
        if code:
            found.failed.append(title)
        found.sections.append((title, f"```\n{printed.strip()}\n```"))

    return Part(title=title, run=run)


# The plan, which also says which runs fit


@cache
def planned(size: str, seq_len: int, batch_size: int, processes: int, memory: int) -> dict[tuple[str, Any], Row]:
    """The plan of every engine by ``lightning-shard plan``, by name and form of activation checkpointing."""
    model = {"size": size, "seq_len": seq_len, "batch_size": batch_size}
    options = {
        "model": f"{Planned.__module__ if __name__ != '__main__' else __spec__.name}.Planned",
        **{f"model.{name}": value for name, value in model.items()},
        "trainer.strategy": "shard_fsdp",
        "trainer.precision": "bf16-mixed",
    }
    with contextlib.redirect_stdout(io.StringIO()):
        rows = tools.plan([], device_memory=f"{memory}B", devices=processes, compare=True, options=options).others
    return {(row.name, row.checkpointing): row for row in rows if not row.refused}


def planned_for(machine: Machine, work: Workload, size: str) -> dict[tuple[str, Any], Row]:
    """The plan of a workload."""
    return planned(size, work.seq_len, work.batch_size, machine.processes, machine.memory)


def room(machine: Machine, work: Workload, row: Row) -> int:
    """How many contestants like ``row`` fit at once."""
    loaded = 4 * parameters_of(work)
    device = USABLE * machine.memory // max(1, row.most.device.total)
    # The loaded model has one copy, in the page cache, and each process copies the part that it keeps.
    free = USABLE * machine.host - loaded
    return int(
        min(device, free // (machine.processes * row.most.host.total) if row.most.host.total else device * (free > 0))
    )


# Fast


def race(machine: Machine, options: argparse.Namespace, size: str, name: str, form: str = "") -> Part:
    """A race of `engines`, as many at a time as fit."""
    title = ", ".join(filter(None, (size, name, form)))

    def run(found: Findings, until: float) -> None:
        arguments = engines.parse_arguments(["--device", machine.device, "--size", size])
        work = replace(_workload(machine, options, arguments), **FORMS.get(form, {}))
        plain = _plain_name(name)
        row = planned_for(machine, work, size).get((plain, work.checkpointing))
        together = 0 if row is None else room(machine, work, row)
        if together < 1:
            found.left_out.append(f"{title}: {plain} {'is refused' if row is None else 'does not fit'}")
            return
        settings = {"rounds": options.rounds, "steps": options.steps, "only": None}
        vars(arguments).update(settings, apart=together < len(engines.RACES[name]), alone=together < 2)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            rows, _ = engines.measure_time(name, with_weights(work, machine.folder), arguments, until=until)
            engines.add_mfu(rows, work, options.peak_tflops)
        for each in rows:
            each["title"] = title
        found.failed += [f"{title}: {each['contestant']} has other losses" for each in rows if each.get("failed")]
        own = {other for other in engines.RACES[name] if other.startswith("shard_")}
        found.failed += [f"{title}: {other} did not run" for other in sorted(own - contestants(rows))]
        said = "\n".join(f"- {line}" for line in printed.getvalue().splitlines())
        table = report.markdown(rows, SPEED) if rows else ""
        found.sections.append((title, "\n\n".join(filter(None, (describe(work), table, said)))))
        found.speed += rows

    return Part(title=title, run=run)


def _workload(machine: Machine, options: argparse.Namespace, arguments: argparse.Namespace) -> Workload:
    vars(arguments).update(seq_len=options.seq_len, batch_size=options.batch_size, precision="bf16-mixed")
    return replace(workload_of(arguments), processes=machine.processes)


# True


def memory(machine: Machine, options: argparse.Namespace, size: str, race_name: str) -> Part:
    """The peak of this package's plain name alone, and its plan."""
    name = _plain_name(race_name)
    title = f"{size}, {name}: memory"

    def run(found: Findings, until: float) -> None:
        work = _workload(machine, options, engines.parse_arguments(["--device", machine.device, "--size", size]))
        row = planned_for(machine, work, size).get((name, None))
        if row is None or room(machine, work, row) < 1:
            found.left_out.append(f"{title}: it does not fit, or is refused")
            return
        measured = engines.measure_memory([name], with_weights(work, machine.folder), until=until)
        if name in measured:
            plan = row.most.device.total / MEBIBYTE
            numbers = {"planned": round(plan, 1), "memory": round(measured[name], 1)}
            part = round(measured[name] / plan, 3)
            found.memory.append({"contestant": name, "race": f"{size}, {name}", **numbers, "part": part})
        else:
            found.failed.append(f"{title}: it did not run")

    return Part(title=title, run=run)


def _plain_name(race_name: str) -> str:
    return next(name for name in engines.RACES[race_name] if name.startswith("shard_"))


# All


def parts_of(machine: Machine, options: argparse.Namespace) -> Iterator[Part]:
    """The most important parts come first."""
    first, *larger = options.sizes
    parts = set(options.parts)
    for precision in ("bf16-mixed", "32-true") if "check" in parts else ():
        yield check(machine, precision)
    wanted = {
        kind: [name for name in names if name in options.races]
        for kind, names in (("first", FIRST), ("further", FURTHER))
    }
    speed, peaks = "speed" in parts, "memory" in parts
    yield from (race(machine, options, first, name) for name in wanted["first"] if speed)
    yield from (memory(machine, options, first, name) for name in wanted["first"] if peaks)
    forms = [form for form in options.forms if speed and "fsdp" in options.races]
    yield from (race(machine, options, first, "fsdp", form) for form in forms)
    for size in larger:
        yield from (race(machine, options, size, name) for name in wanted["first"] if speed)
        yield from (race(machine, options, size, "fsdp", form) for form in forms)
        yield from (memory(machine, options, size, name) for name in wanted["first"] if peaks)
    yield from (memory(machine, options, first, name) for name in wanted["further"] if peaks)
    yield from (race(machine, options, first, name) for name in wanted["further"] if speed)


def run_parts(parts: Iterator[Part], found: Findings, *, seconds: float, output: Path) -> None:
    """Run the parts in turn, until the time is up. A part that fails leaves the others."""
    until = time.monotonic() + seconds
    for part in parts:
        left = until - time.monotonic()
        if left < LEAST_SECONDS:
            found.left_out.append(f"{part.title}: the time was up")
            continue
        say(f"{part.title} ({left / 60:.0f} minutes left)")
        start = time.monotonic()
        try:
            part.run(found, until)
        except (Failed, ShardError) as error:
            found.failed.append(f"{part.title}: {error}")
        say(f"  {time.monotonic() - start:.0f} s")
        write(found, output)
    write(found, output)


def write(found: Findings, output: Path) -> None:
    """The page ``gpu_report.md``, its picture, and the rows as CSV files."""
    pictures = draw(found, output / "gpu_report.png")
    verdict = [f"- {line}" for line in found.failed] or ["Nothing failed."]
    lines = ["# GPU report", "", found.title, "", "## Failed", "", *verdict, ""]
    lines += ["![times, MFU and memory](gpu_report.png)", ""] if pictures else []
    if found.memory:
        lines += ["## Peak memory of a device, and the plan", "", report.markdown(found.memory, MEMORY), ""]
        lines += ["Of the rank that needs most, as `torch.cuda.max_memory_allocated` has it; on CPUs the process'.", ""]
    for heading, text in found.sections:
        lines += [f"## {heading}", "", text, ""]
    lines += ["## Left out", "", *([f"- {line}" for line in found.left_out] or ["Nothing."]), ""]
    output.mkdir(parents=True, exist_ok=True)
    (output / "gpu_report.md").write_text("\n".join(lines))
    for name in ("speed", "memory"):
        if rows := getattr(found, name):
            report.write_csv(rows, output / f"{name}.csv")


def draw(found: Findings, path: Path) -> bool:
    """Draw times as ratios to each race's first, MFU, and measured memory over planned. False if there was nothing."""
    speed, memory = [dict(row, race=row["title"]) for row in found.speed], found.memory
    panels = [
        {"rows": [row for row in rows if row.get(key) is not None], "key": key, "label": label, "line": line}
        for rows, key, label, line in (
            (speed, "ratio", "time of a step (95 %), of the first in each race; lower is better", 1),
            (speed, "mfu", "MFU; higher is better", None),
            (memory, "part", "measured peak memory, of the planned", 1),
        )
    ]
    panels = [panel for panel in panels if panel["rows"]]
    if panels:
        report.draw(panels, path, title=found.title)
    return bool(panels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report. Return 1 if something is not as it should be."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        machine = machine_of(options, Path(folder))
        found = Findings(title=f"{report.environment(machine.device)}; {machine.processes} processes")
        say(found.title)
        run_parts(parts_of(machine, options), found, seconds=60 * options.minutes, output=options.output)
    say("\n".join([*(f"FAILED: {line}" for line in found.failed), f"report: {options.output / 'gpu_report.md'}"]))
    return int(bool(found.failed))


if __name__ == "__main__":
    sys.exit(main())
