r"""The cost of a training step under every engine of this package, and under the code that users would write instead.

    python -m examples.benchmarks.engines                                     # two CPU processes
    python -m examples.benchmarks.engines --device cuda --size 1B --batch-size 2
    python -m examples.benchmarks.engines --device cuda --size 3B --races fsdp --compile --checkpointing selective \
        --batch-size 4 --alone

A race is a loop by hand (or the raw engine), and all others that do the same with the same dtypes, units, batches and
optimizer: stock Lightning, Accelerate, and this package's plain and aligned names. Each has
processes of its own, and they run in turn, a block of steps each. A block is compared with the reference's of the same
round. A Trainer's step is everything between two batches: its hooks, logging calls and data loading are in. Peak memory
is measured alone. A contestant whose losses are not the reference's has failed, however fast it was.
``--control`` lets one of this package race against itself with 5 % of sleep in its step: 1 if that is not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks import report
from examples.benchmarks.processes import MEBIBYTE, Failed, run_processes
from examples.benchmarks.races import (
    compare_with_others,
    contestants,
    rounds_of,
    rows_of,
    say,
    time_one_by_one,
    time_together,
)
from examples.benchmarks.turns import CONTROL, SLEEP, Plan, build_with_control, peak
from examples.benchmarks.workload import Workload, add_arguments, describe, model_flops, workload_of
from lightning_shard.meters.peaks import mfu, peak_flops

RACES = {
    "ddp": [
        "hand_ddp",
        "lightning_ddp",
        "shard_ddp",
        "shard_ddp_aligned",
        "shard_deepspeed_stage_0",
        "shard_deepspeed_stage_0_aligned",
    ],
    "fsdp": [
        "hand_fsdp",
        "lightning_model_parallel",
        "lightning_fsdp",
        "accelerate_fsdp",
        "shard_fsdp",
        "shard_fsdp_aligned",
    ],
    **{
        f"fsdp_{form}": [
            f"hand_fsdp_{form}",
            f"lightning_model_parallel_{form}",
            *others,
            f"shard_fsdp_{form}",
            f"shard_fsdp_{form}_aligned",
        ]
        for form, others in {
            "grad_op": ["lightning_fsdp_grad_op", "accelerate_fsdp_grad_op"],
            "hybrid": [],
            "offload": ["lightning_fsdp_offload", "accelerate_fsdp_offload"],
        }.items()
    },
    **{
        f"{form}": [
            f"deepspeed_{form}",
            *others,
            f"accelerate_deepspeed_{form}",
            f"shard_deepspeed_{form}",
            f"shard_deepspeed_{form}_aligned",
        ]
        for form, others in {
            "stage_1": ["lightning_deepspeed_stage_1"],
            "stage_2": ["lightning_deepspeed_stage_2"],
            "stage_3": ["lightning_deepspeed_stage_3"],
            "stage_2_offload": ["lightning_deepspeed_stage_2_offload"],
            "stage_3_offload": ["lightning_deepspeed_stage_3_offload"],
            "stage_3_offload_nvme": [],
        }.items()
    },
}
"""The reference first, and who does the same."""

COLUMNS = {
    "contestant": "",
    "ms": "ms/step",
    "quartiles": "quartiles",
    "tokens": "tokens/s/device",
    "mfu": "MFU",
    "memory": "peak MiB",
    "memory_ratio": "of reference",
    "ratio": "time ratio",
    "ratios": "95 % of it",
    "other": "fastest other",
    "other_ratio": "time ratio",
    "other_ratios": "95 % of it",
    "loss": "loss differs by",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--races", nargs="+", choices=list(RACES), default=list(RACES), metavar="RACE")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of each race the reference and these")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each contestant")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each that do not count")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: computing alone, on a machine that others use"
    )
    parser.add_argument("--apart", action="store_true", help="large models: the reference and one other at a time")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="for large models: one at a time, which also takes blocks of one round at different times",
    )
    parser.add_argument("--control", action="store_true", help="is 5 %% of sleep in a step seen?")
    parser.add_argument("--peak-tflops", type=float, help="of a device, for MFU (default: by its name, if known)")
    parser.add_argument("--skip", choices=["time", "memory"], help="measure the other alone")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def line_up(name: str, options: argparse.Namespace) -> list[list[str]]:
    """The contestants of a race, those that share processes together."""
    reference, *others = RACES[name]
    others = [other for other in others if options.only is None or other in options.only]
    if options.control:
        own = next(other for other in RACES[name] if other.startswith("shard_"))
        return [[own, own + CONTROL]]
    return [[reference, other] for other in others] if options.apart else [[reference, *others]]


def measure_time(
    race_name: str, work: Workload, options: argparse.Namespace, *, until: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Rows of contestants and of their blocks. Prints contestants that were left out, with the reason."""
    plan = Plan(rounds=options.rounds, steps=options.steps, warmup=options.warmup, clock=options.clock, until=until)
    rows: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    for names in line_up(race_name, options):
        try:
            result = (time_one_by_one if options.alone else time_together)(names, work, plan, build_with_control)
        except Failed as error:
            say(f"{race_name}: {', '.join(names)} did not run: {error}")
            continue
        for name, why in result.left_out.items():
            say(f"{race_name}: {name} did not run: {why}")
        new = rows_of(race_name, result, work, lambda name, first=names[0]: first)
        compare_with_others(new, result)
        rows += [row for row in new if row["contestant"] not in contestants(rows)]
        rounds += rounds_of(race_name, result)
    return rows, rounds


def add_mfu(rows: list[dict[str, Any]], work: Workload, peak_tflops: float | None) -> None:
    """Model FLOPs utilisation, if the device's peak is known."""
    device_peak = None if peak_tflops is None else 1e12 * peak_tflops
    if device_peak is None and work.device != "cpu":
        device_peak = peak_flops(report.device_name(work.device), work.compute_dtype)
    if device_peak is None:
        say(f"no MFU: the peak of {report.device_name(work.device)} is not known. Give it as --peak-tflops")
        return
    flops = model_flops(work)
    for row in rows:
        row["mfu"] = round(mfu(flops, 1e-3 * row["ms"], device_peak), 3)


def measure_memory(names: Sequence[str], work: Workload, *, until: float | None = None) -> dict[str, float]:
    """Peak MiB of each contestant that runs alone, of the rank that needs most. ``until``: of the `Plan`."""
    found = {}
    for name in names:
        try:
            plan = Plan(rounds=1, steps=3, warmup=2, until=until)
            place: dict[str, Any] = {"processes": work.processes, "device": work.device}
            ranks = run_processes(peak, name, work, plan, **place, timeout=plan.seconds_left)
        except Failed as error:
            say(f"{name} has no peak memory: {error}")
            continue
        found[name] = max(ranks) / MEBIBYTE
    return found


def add_memory(rows: list[dict[str, Any]], race_name: str, options: argparse.Namespace, work: Workload) -> None:
    """Measure peak memory and put it into the rows, new ones for contestants without times."""
    names = list(dict.fromkeys(name for group in line_up(race_name, options) for name in group))
    if options.skip != "time":
        names = [name for name in names if name in contestants(rows)]
    memory = measure_memory(names, work)
    for name, found in memory.items():
        row = next((row for row in rows if row["contestant"] == name), None)
        if row is None:
            row = {"race": race_name, "contestant": name}
            rows.append(row)
        row["memory"] = round(found, 1)
        if names[0] in memory:
            row["memory_ratio"] = round(found / memory[names[0]], 4)


def draw(rows: list[dict[str, Any]], folder: Path, title: str) -> None:
    """Times and memory, a picture each, as ratios to each race's reference."""
    labels = {"ratio": ("engines", "time of a step"), "memory_ratio": ("engines_memory", "peak memory")}
    for key, (stem, label) in labels.items():
        shown = [row for row in rows if row.get(key) is not None]
        if shown:
            of = f"{label}, of the loop by hand's or the raw engine's"
            report.draw_ratios(shown, key, folder / f"{stem}.png", title=title, label=of)


def _control(rows: list[dict[str, Any]]) -> int:
    """1 if sleep in a step was not seen, or there is none."""
    slowed = [row for row in rows if row["contestant"].endswith(CONTROL)]
    unseen = [row["race"] for row in slowed if not row.get("ratio_low", 0.0) > 1.0]
    say(f"control: {SLEEP:.0%} of sleep is seen in {len(slowed) - len(unseen)} of {len(slowed)} races")
    return int(bool(unseen) or not slowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races. Return 1 if a contestant's losses were not the reference's."""
    options = parse_arguments(arguments)
    work = workload_of(options)
    title = f"{describe(work)}\n{report.environment(work.device)}"
    say(title)
    # The two are often measured at different sizes, or at different times of a busy machine.
    stem = "engines_memory" if options.skip == "time" else "engines"
    rows: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    for name in options.races:
        new, blocks = ([], []) if options.skip == "time" else measure_time(name, work, options)
        add_mfu(new, work, options.peak_tflops)
        if options.skip != "memory":
            add_memory(new, name, options, work)
        rows += new
        rounds += blocks
        say(f"\n{name}, {report.load()}\n{report.table(new, COLUMNS)}\n")
        # Measured rows stay if the run is cut short.
        report.write_csv(rows, options.output / f"{stem}.csv")
        if rounds:
            report.write_csv(rounds, options.output / f"{stem}_blocks.csv")
    if options.control:
        return _control(rows)
    draw(rows, options.output, title)
    say(f"rows, blocks and pictures: {options.output}")
    return int(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
