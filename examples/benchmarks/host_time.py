"""The cost of a step for the host: Python calls and CPU time with tensors so small that nothing else takes time.

    python -m examples.benchmarks.host_time                                    # 291 and about 5,000 parameters
    python -m examples.benchmarks.host_time --blocks 32 --races fsdp stage_3

On a GPU this is the time to launch a step, which is exposed wherever kernels are small. Each contestant runs in
processes of its own. Calls of Python functions in one step are counted by ``sys.setprofile`` in the thread that
trains. They are the same in each run. CPU time is the whole process's. The last two columns are calls and CPU time
relative to the loop by hand, without the Trainer's own part, measured under stock Lightning's strategy. Its DeepSpeed
refuses CPUs: there the Trainer's part is included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from examples.benchmarks import report
from examples.benchmarks.llama import SIZES
from examples.benchmarks.processes import Failed, Place, run_processes
from examples.benchmarks.races import say
from examples.benchmarks.trainers import TrainerLoop
from examples.benchmarks.turns import Contestant, Plan
from examples.benchmarks.variants import build_variant
from examples.benchmarks.workload import Workload

RACES = {
    # By hand, stock Lightning, and this package's.
    "ddp": ("hand_ddp+clip", "lightning_ddp+clip", "shard_ddp+clip", "shard_ddp_aligned+clip"),
    "fsdp": ("hand_fsdp+clip", "lightning_model_parallel+clip", "shard_fsdp+clip", "shard_fsdp_aligned+clip"),
    **{
        f"stage_{n}": (
            f"deepspeed_stage_{n}",
            f"lightning_deepspeed_stage_{n}",
            f"shard_deepspeed_stage_{n}",
            f"shard_deepspeed_stage_{n}_aligned",
        )
        for n in (1, 2, 3)
    },
}
WARMUP = 8
"""Steps ahead of all others. In the first ones this package compares ranks and steps."""

COLUMNS = {
    "contestant": "",
    "parameters": "parameters",
    "calls": "Python calls",
    "cpu_ms": "CPU ms",
    "calls_ratio": "calls ratio",
    "cpu_ratio": "CPU ratio",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 555], help="of nine parameters each")
    parser.add_argument("--races", nargs="+", choices=list(RACES), default=list(RACES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="whose CPU time is taken, by the median")
    parser.add_argument("--files", type=int, metavar="N", default=0, help="also list the N functions called most")
    return parser.parse_args(arguments)


def workload(blocks: int, race: str, processes: int) -> Workload:
    """Blocks of nine parameters, which are units, and three more parameters."""
    size = replace(SIZES["tiny"], layers=blocks, width=16, hidden=16, vocabulary=256)
    # torch's DDP has no master weights.
    precision = "32-true" if race == "ddp" else "bf16-mixed"
    return Workload(size=size, seq_len=4, batch_size=1, precision=precision, processes=processes, foreach=True)


def measure(place: Place, name: str, work: Workload, steps: int) -> tuple[float, Counter[str]]:
    """Median CPU seconds of a steady step, and how often each function is called in one. All ranks call it."""
    plan = Plan(rounds=1, steps=steps + 1, warmup=WARMUP)
    contestant = build_variant(name, work, place, plan)
    contestant.run(WARMUP)
    seconds = []
    for _ in range(steps):
        place.meet()
        begin = time.process_time()
        contestant.run(1)
        seconds.append(time.process_time() - begin)
    place.meet()
    return statistics.median(seconds), calls_of_step(contestant)


def calls_of_step(contestant: Contestant) -> Counter[str]:
    """File and function to the number of its calls in one step."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            calls["/".join(frame.f_code.co_filename.split("/")[-3:]) + ":" + frame.f_code.co_name] += 1

    if isinstance(contestant, TrainerLoop):
        # The fit runs on a stack of its own, which has a profile function of its own.
        contestant.before_step(lambda: sys.setprofile(count))
        contestant.run(1)
        contestant.before_step(lambda: sys.setprofile(None))
    else:
        sys.setprofile(count)
        contestant.run(1)
    sys.setprofile(None)
    return calls


def race(name: str, blocks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contestant. All run in turn, each in processes of its own."""
    work = workload(blocks, name, options.processes)
    rows: list[dict[str, Any]] = []
    for contestant in RACES[name]:
        row: dict[str, Any] = {"contestant": contestant, "parameters": 9 * blocks + 3}
        rows.append(row)
        try:
            ranks = run_processes(
                measure, contestant, work, options.steps, processes=options.processes, device="cpu", timeout=1800
            )
        except Failed as error:
            say(f"{contestant}: {error}")
            continue
        seconds, calls = max(ranks, key=lambda rank: rank[0])
        row.update(calls=calls.total(), cpu_ms=round(1e3 * seconds, 1))
        for function, count in calls.most_common(options.files):
            say(f"{count:8d} {function}")
    hand, stock = rows[:2]
    for row in rows[2:]:
        for key, ratio in (("calls", "calls_ratio"), ("cpu_ms", "cpu_ratio")):
            if key in row and key in hand:
                trainer = stock[key] - hand[key] if key in stock else 0
                row[ratio] = round((row[key] - trainer) / hand[key], 3)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse_arguments(arguments)
    say(f"{report.environment('cpu')}, {options.processes} processes")
    for blocks in options.blocks:
        for name in options.races:
            say(report.table(race(name, blocks, options), COLUMNS))


if __name__ == "__main__":
    main()
