"""The largest batch and the largest model that fit into a given memory under each engine, and the throughput there.

    python -m examples.benchmarks.max_batch                                    # two CPU processes, 256 MiB each
    python -m examples.benchmarks.max_batch --device cuda --memory 65536 --size 1B

By bisection, with runs that really take the steps, each in new processes. The limit is on what a process takes
above what it had when its process group stood: on GPUs tensors', held by the allocator; on CPUs resident memory, whose
peak is measured. On CPUs "offload" moves nothing to another place: its host is the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks import report
from examples.benchmarks.limits import MemoryLimit, Trial, is_out_of_memory, largest
from examples.benchmarks.llama import Llama
from examples.benchmarks.processes import MEBIBYTE, Failed, Place, run_processes
from examples.benchmarks.races import say
from examples.benchmarks.turns import Plan, build
from examples.benchmarks.workload import Workload, add_arguments, describe, workload_of

ENGINES = [
    "shard_ddp",
    "shard_deepspeed_stage_1",
    "shard_deepspeed_stage_2",
    "shard_deepspeed_stage_2_offload",
    "shard_deepspeed_stage_3",
    "shard_deepspeed_stage_3_offload",
    "shard_fsdp_grad_op",
    "shard_fsdp",
    "shard_fsdp_offload",
]

COLUMNS = {
    "engine": "",
    "batch": "largest batch",
    "batch_tokens": "tokens/s/device",
    "batch_memory": "peak MiB",
    "parameters": "largest model (M)",
    "layers": "layers",
    "model_tokens": "tokens/s/device",
    "model_memory": "peak MiB",
    "trials": "trials",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--memory", type=int, help="MiB of a process; default: 256 on CPUs, 65536")
    parser.add_argument("--engines", nargs="+", default=ENGINES, metavar="NAME")
    parser.add_argument("--most", type=int, default=256, help="no larger batch, and no more layers")
    parser.add_argument("--steps", type=int, default=3, help="steps of a trial that are timed")
    parser.add_argument("--skip", choices=["batch", "model"], help="look for the other alone")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def trial(place: Place, name: str, work: Workload, limit: int, steps: int) -> tuple[int, float] | None:
    """Peak bytes and seconds per step of a run, or None if it does not fit. All ranks call it."""
    memory = MemoryLimit(place, limit)
    plan = Plan(rounds=1, steps=steps, warmup=2)
    try:
        contestant = build(name, work, place, plan)
        # One at a time: what grows beyond the limit is not let grow on. Optimizer state comes with the first.
        for _ in range(plan.warmup):
            contestant.run(1)
            memory.check()
        start = place.now()
        contestant.run(steps)
        seconds = (place.now() - start) / steps
        return memory.check(), seconds
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise


def attempt(name: str, work: Workload, size: int, limit: int, steps: int) -> Trial | None:
    """A trial in new processes; None if it does not fit."""
    found = run_processes(trial, name, work, limit, steps, processes=work.processes, device=work.device)
    if None in found:
        return None
    return Trial(size=size, peak=found[0][0], seconds=max(seconds for _, seconds in found))


def deepened(work: Workload, layers: int) -> Workload:
    """The workload with so many layers, on a single sequence."""
    return replace(work, batch_size=1, size=replace(work.size, layers=layers))


def parameters_of(work: Workload) -> int:
    """Of the model."""
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(work.size, work.seq_len).parameters())


def measure(name: str, work: Workload, limit: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"engine": name, "trials": 0}
    if options.skip != "batch":
        best, tried = largest(
            lambda size: attempt(name, replace(work, batch_size=size), size, limit, options.steps), most=options.most
        )
        row["trials"] += tried
        row["batch"] = 0 if best is None else best.size
        if best is not None:
            row["batch_tokens"] = round(best.size * work.seq_len / best.seconds)
            row["batch_memory"] = round(best.peak / MEBIBYTE, 1)
    if options.skip != "model":
        best, tried = largest(
            lambda size: attempt(name, deepened(work, size), size, limit, options.steps), most=options.most
        )
        row["trials"] += tried
        row["layers"] = 0 if best is None else best.size
        if best is not None:
            row["parameters"] = round(parameters_of(deepened(work, best.size)) / 1e6, 2)
            row["model_tokens"] = round(work.seq_len / best.seconds)
            row["model_memory"] = round(best.peak / MEBIBYTE, 1)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engines one after the other."""
    options = parse_arguments(arguments)
    work = workload_of(options)
    memory = options.memory or (65536 if work.device == "cuda" else 256)
    title = f"{memory} MiB for each process; {describe(work)}\n{report.environment(work.device)}"
    say(title)
    rows = []
    for name in options.engines:
        try:
            rows.append(measure(name, work, memory * MEBIBYTE, options))
        except Failed as error:
            say(f"{name} did not run: {error}")
            continue
        say(f"{name}: {rows[-1]}")
        report.write_csv(rows, options.output / "max_batch.csv")
    say(f"\n{report.table(rows, COLUMNS)}")
    draw(rows, options.output / "max_batch.png", title)
    say(f"rows and picture: {options.output}")
    return 0


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Largest batch, throughput there, and largest model."""
    panels = []
    keys = {"batch": "largest batch", "batch_tokens": "tokens/s/device there", "parameters": "largest model (M)"}
    for key, name in keys.items():
        shown = [row for row in rows if row.get(key) is not None]
        if shown:
            labels, values = [row["engine"] for row in shown], [row[key] for row in shown]
            panels.append({"title": name, "labels": labels, "values": values})
    if panels:
        report.draw_bars(panels, path, title=title)


if __name__ == "__main__":
    sys.exit(main())
