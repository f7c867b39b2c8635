"""What is paid besides plain steps: imports, the time to the first step, validation, logging, accumulation, clipping.

    python -m examples.benchmarks.overheads                                   # two CPU processes
    python -m examples.benchmarks.overheads --device cuda --parts clipping accumulation

Contestants take turns, in the same processes where that is possible; each is compared with the loop by hand that does
the same. ``log`` logs twenty values in each step and is compared with a loop that logs none. A step of
``validate`` is one with four validation batches after it. Accumulation is over four batches, a step is one of them;
``micro_batch`` reduces gradients after each, ``boundary`` after the last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks import report
from examples.benchmarks.processes import Failed, Place, run_processes
from examples.benchmarks.races import ratios, rounds_of, rows_of, say, time_together
from examples.benchmarks.turns import Plan, build, paired, spread
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
    "ratios": "smallest..largest",
    "loss": "loss differs by",
}
SECONDS = {
    "contestant": "",
    "seconds": "seconds",
    "ratio": "ratio",
    "ratios": "smallest..largest",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parts = ["import", "first_step", *RACES]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each contestant")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block, a multiple of 4 for accumulation")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each that do not count, likewise")
    parser.add_argument("--repeats", type=int, default=5, help="of imports and first steps")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def import_seconds(module: str) -> float:
    """Seconds of a new interpreter that imports ``module``."""
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


def rows_in_turn(part: str, names: Sequence[str], measure: Any, repeats: int) -> list[dict[str, Any]]:
    """Measure each in turn, several times; compared with the last loop by hand, or raw engine, before it in `names`."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(repeats):
        for name in list(names)[:: -1 if index % 2 else 1]:
            try:
                seconds[name].append(measure(name))
            except (Failed, subprocess.CalledProcessError) as error:
                say(f"{part}: {name} did not run: {error}")
    rows, reference = [], names[0]
    for name, found in seconds.items():
        if len(found) < repeats:
            continue
        reference = name if name.startswith(("hand_", "deepspeed_")) else reference
        ratio = paired(found, seconds[reference]) if len(seconds[reference]) == repeats else None
        rows.append(
            {
                "part": part,
                "contestant": name,
                "seconds": round(spread(found).median, 3),
                **({} if ratio is None else ratios(ratio)),
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
    """Run the parts; 1 if a contestant's losses were not the reference's."""
    options = parse_arguments(arguments)
    work = workload_of(options)
    plan = Plan(rounds=options.rounds, steps=options.steps, warmup=options.warmup)
    title = f"{describe(work)}\n{report.environment(work.device)}"
    say(title)
    rows: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    for part in options.parts:
        columns = SECONDS
        if part == "import":
            new = rows_in_turn(part, IMPORTS, import_seconds, options.repeats)
        elif part == "first_step":
            new = rows_in_turn(part, FIRST_STEPS, lambda name: first_step_seconds(name, work), options.repeats)
        else:
            columns = COLUMNS
            new, blocks = race_rows(part, work, plan)
            rounds += blocks
        rows += new
        say(f"\n{part}\n{report.table(new, columns)}\n")
        report.write_csv(rows, options.output / "overheads.csv")
        report.write_csv(rounds, options.output / "overheads_blocks.csv")
    draw(rows, options.output / "overheads.png", title)
    say(f"rows, blocks and picture: {options.output}")
    return int(any(row.get("failed") for row in rows))


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Every ratio, part by part."""
    shown = [row for row in rows if row.get("ratio") is not None]
    if not shown:
        return
    labels = [f"{row['contestant']}  [{row['part']}]" for row in shown]
    panel = report.ratio_panel(shown, "ratio", labels, "time, of the loop by hand that does the same")
    report.draw_bars([panel], path, title=title)


if __name__ == "__main__":
    sys.exit(main())
