"""Costs besides plain steps: imports, the time to the first step, validation, logging, accumulation, clipping.

    python -m examples.benchmarks.overheads                                   # two CPU processes
    python -m examples.benchmarks.overheads --device cuda --parts clipping accumulation

Contestants take turns, in the same processes if that is possible. Each is compared with the loop by hand that does
the same. ``log`` logs twenty values in each step and is compared with a loop that logs none. A step of
``validate`` is one with four validation batches after it. Accumulation is over four batches, a step is one of them:
``micro_batch`` reduces gradients after each, ``boundary`` after the last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from examples.benchmarks import report
from examples.benchmarks.processes import Failed, Place, run_processes
from examples.benchmarks.races import ratios, rounds_of, rows_of, say, time_together
from examples.benchmarks.turns import Plan, Result, build, paired, spread
from examples.benchmarks.variants import build_variant
from examples.benchmarks.workload import Workload, add_arguments, describe, workload_of

RACES = {
    "validation": ["hand_fsdp+validate", "lightning_model_parallel+validate", "shard_fsdp+validate"],
    "logging": ["hand_fsdp", "lightning_model_parallel+log", "shard_fsdp+log", "shard_fsdp"],
    "accumulation": [
        *(f"{name}+{sync}" for name in ("hand_fsdp", "shard_fsdp", "shard_fsdp_aligned") for sync in ("micro_batch",)),
        "lightning_model_parallel+micro_batch",
        *(f"{name}+boundary" for name in ("hand_fsdp", "shard_fsdp", "shard_fsdp_aligned")),
        *(f"{name}+{sync}" for name in ("hand_ddp", "shard_ddp") for sync in ("micro_batch", "boundary")),
        "lightning_ddp+boundary",
    ],
    "clipping": [
        *(f"{name}+clip" for name in ("hand_fsdp", "lightning_model_parallel", "shard_fsdp", "shard_fsdp_aligned")),
        "hand_fsdp",
        "shard_fsdp",
    ],
}

IMPORTS = ["lightning.pytorch", "lightning_shard"]
FIRST_STEPS = [
    "hand_ddp",
    "lightning_ddp",
    "shard_ddp",
    "hand_fsdp",
    "lightning_model_parallel",
    "shard_fsdp",
    "shard_fsdp_aligned",
    "deepspeed_stage_3",
    "shard_deepspeed_stage_3",
    "shard_deepspeed_stage_3_aligned",
]

COLUMNS = {
    "contestant": "",
    "ms": "ms/step",
    "quartiles": "quartiles",
    "steps_per_second": "steps/s",
    "ratio": "time ratio",
    "ratios": "95 % of it",
    "loss": "loss differs by",
}
SECONDS = {
    "contestant": "",
    "seconds": "seconds",
    "quartiles": "quartiles",
    "ratio": "ratio",
    "ratios": "95 % of it",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parts = ["import", "first_step", *RACES]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each contestant")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block, a multiple of 4 for accumulation")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each that do not count, likewise")
    parser.add_argument("--repeats", type=int, default=3, help="of imports and first steps")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


@cache
def read_from_disk(module: str) -> None:
    """Import ``module`` in a new interpreter, so that its files are in the page cache and compiled.

    Raises:
        CalledProcessError: it can't be imported.
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", f"import {module}"], check=True)


def import_seconds(module: str) -> float:
    """Seconds of a new interpreter that imports ``module``, which was read from disk before."""
    read_from_disk(module)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def first_step(place: Place, name: str, work: Workload) -> float:
    """Seconds from nothing but a process group to the end of the first step."""
    place.meet()
    start = place.now()
    contestant = build(name, work, place, Plan(rounds=1, steps=1, warmup=0))
    contestant.run(1)
    return place.now() - start


def first_step_seconds(name: str, work: Workload) -> float:
    """The same of the slowest rank, in new processes."""
    return max(run_processes(first_step, name, work, processes=work.processes, device=work.device))


def time_in_turn(part: str, names: Sequence[str], measure: Callable[[str], float], repeats: int) -> Result:
    """Measure each in turn, every second time backwards. A contestant that does not run is told once, and left out."""
    result = Result(seconds={name: [] for name in names})
    for index in range(repeats):
        for name in list(result.seconds)[:: -1 if index % 2 else 1]:
            try:
                result.seconds[name].append(measure(name))
            except (Failed, subprocess.CalledProcessError) as error:
                say(f"{part}: {name} did not run: {error}")
                del result.seconds[name]
    return result


def rows_of_seconds(part: str, names: Sequence[str], result: Result) -> list[dict[str, Any]]:
    """A row for each, compared with the last loop by hand, or raw engine, before it in ``names``."""
    rows, reference = [], names[0]
    for name in names:
        reference = name if name.startswith(("hand_", "deepspeed_")) else reference
        if name not in result.seconds:
            continue
        own, others = result.seconds[name], result.seconds.get(reference)
        found = spread(own)
        rows.append(
            {
                "part": part,
                "contestant": name,
                "seconds": round(found.median, 3),
                "quartiles": f"{found.low:.3f}..{found.high:.3f}",
                **({} if others is None else ratios(paired(own, others))),
            }
        )
    return rows


def reference_of(name: str) -> str:
    """The loop by hand that does the same."""
    base, plus, feature = name.partition("+")
    by_hand = "hand_ddp" if "ddp" in base else "hand_fsdp"
    return by_hand if feature in ("", "log") else by_hand + plus + feature


def race_rows(part: str, work: Workload, plan: Plan) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of contestants and of their blocks."""
    try:
        result = time_together(RACES[part], work, plan, build_variant)
    except Failed as error:
        say(f"{part} did not run: {error}")
        return [], []
    for name, why in result.left_out.items():
        say(f"{part}: {name} did not run: {why}")
    rows = rows_of(part, result, work, reference_of)
    for row in rows:
        row["part"] = row.pop("race")
        row["steps_per_second"] = round(1e3 / row["ms"], 3)
    return rows, rounds_of(part, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts. Return 1 if a contestant's losses were not the reference's."""
    options = parse_arguments(arguments)
    work = workload_of(options, seq_len=128)
    plan = Plan(rounds=options.rounds, steps=options.steps, warmup=options.warmup)
    title = f"{describe(work)}\n{report.environment(work.device)}"
    say(title)
    rows: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    once: dict[str, tuple[list[str], Callable[[str], float]]] = {
        "import": (IMPORTS, import_seconds),
        "first_step": (FIRST_STEPS, lambda name: first_step_seconds(name, work)),
    }
    for part in options.parts:
        if part in once:
            names, measure = once[part]
            result = time_in_turn(part, names, measure, options.repeats)
            new = rows_of_seconds(part, names, result)
            blocks = [
                {"race": part, "contestant": name, "round": index, "seconds": seconds}
                for name, found in result.seconds.items()
                for index, seconds in enumerate(found)
            ]
        else:
            new, blocks = race_rows(part, work, plan)
        rounds += blocks
        rows += new
        say(f"\n{part}\n{report.table(new, SECONDS if part in once else COLUMNS)}\n")
        report.write_csv(rows, options.output / "overheads.csv")
        report.write_csv(rounds, options.output / "overheads_blocks.csv")
    say(f"rows and blocks: {options.output}")
    return int(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
