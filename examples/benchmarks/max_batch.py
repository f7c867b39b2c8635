"""The largest batch and the largest model that fit into a given memory under each engine, and the throughput there.

    python -m examples.benchmarks.max_batch                                    # two CPU processes, 560 MiB each
    python -m examples.benchmarks.max_batch --device cuda --memory 65536 --size 1B

By bisection, with runs that really take the steps, each in new processes. The next engine begins with the last
result. The limit is on memory that a process takes after its process group was formed: on GPUs tensors', held by the
allocator, and on CPUs resident memory, whose peak is measured. Then the engines run their largest batches in turn, for
the throughput: its ratio is to the first engine's in the same round. The largest model is the deepest, on one sequence.

On CPUs engines with offload are left out, unless ``--engines`` names them: their host is the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.benchmarks import report
from examples.benchmarks.limits import MemoryLimit, Trial, is_out_of_memory, largest
from examples.benchmarks.processes import MEBIBYTE, Failed, Place, run_processes
from examples.benchmarks.races import ratios, say
from examples.benchmarks.turns import Plan, build, paired, spread
from examples.benchmarks.workload import Workload, add_arguments, parameters_of, workload_of

ENGINES = [
    "shard_ddp",
    "shard_deepspeed_stage_1",
    "shard_deepspeed_stage_2",
    "shard_deepspeed_stage_3",
    "shard_fsdp",
]
OFFLOADING = ["shard_fsdp_offload", "shard_deepspeed_stage_2_offload", "shard_deepspeed_stage_3_offload"]

COLUMNS = {
    "engine": "",
    "batch": "largest batch",
    "batch_memory": "peak MiB",
    "batch_tokens": "tokens/s/device",
    "batch_quartiles": "quartiles",
    "ratio": "of the first's",
    "ratios": "95 % of it",
    "parameters": "largest model (M)",
    "layers": "layers",
    "model_memory": "peak MiB",
    "model_tokens": "tokens/s/device",
    "trials": "trials",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--memory", type=int, help="MiB of a process (default: 560 on CPUs, 65536)")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="default: all, without offload on CPUs")
    parser.add_argument("--most", type=int, default=256, help="no larger batch, and no more layers")
    parser.add_argument("--steps", type=int, default=1, help="steps of a trial that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="rounds with the largest batches, for the throughput")
    parser.add_argument("--resolution", type=int, default=8, help="sizes are found to one part in so many")
    parser.add_argument("--skip", choices=["batch", "model"], help="look for the other alone")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def trial(place: Place, name: str, work: Workload, limit: int, steps: int) -> tuple[int, float] | None:
    """Peak bytes and seconds per step of a run, or None if it does not fit. All ranks call it."""
    memory = MemoryLimit(place, limit)
    plan = Plan(rounds=1, steps=steps, warmup=2)
    try:
        contestant = build(name, work, place, plan)
        # One at a time, so that growth beyond the limit ends at once. Optimizer state comes with the first.
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
    """A trial in new processes, None if it does not fit."""
    found = run_processes(trial, name, work, limit, steps, processes=work.processes, device=work.device)
    if None in found:
        return None
    return Trial(size=size, peak=found[0][0], seconds=max(seconds for _, seconds in found))


def deepened(work: Workload, layers: int) -> Workload:
    """The workload with so many layers, on a single sequence."""
    return replace(work, batch_size=1, size=replace(work.size, layers=layers))


def measure(
    name: str, work: Workload, limit: int, options: argparse.Namespace, before: Mapping[str, Any]
) -> dict[str, Any]:
    """One row, without the throughput at the largest batch. ``before``: the row of the engine before it."""
    row: dict[str, Any] = {"engine": name, "trials": 0}

    def search(sized: Callable[[int], Workload], start: int) -> Trial | None:
        best, tried = largest(
            lambda size: attempt(name, sized(size), size, limit, options.steps),
            most=options.most,
            resolution=options.resolution,
            start=start,
        )
        row["trials"] += tried
        return best

    if options.skip != "batch":
        best = search(lambda size: replace(work, batch_size=size), before.get("batch") or 4)
        row["batch"] = 0 if best is None else best.size
        if best is not None:
            row["batch_memory"] = round(best.peak / MEBIBYTE, 1)
    if options.skip != "model":
        best = search(lambda layers: deepened(work, layers), before.get("layers") or work.size.layers)
        row["layers"] = 0 if best is None else best.size
        if best is not None:
            row["parameters"] = round(parameters_of(deepened(work, best.size)) / 1e6, 2)
            row["model_tokens"] = round(work.seq_len / best.seconds)
            row["model_memory"] = round(best.peak / MEBIBYTE, 1)
    return row


def time_in_turn(
    rows: Sequence[dict[str, Any]], work: Workload, limit: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Put the throughput at the largest batches into ``rows``, and return the rounds. Every second one is backwards."""
    batches = {row["engine"]: row["batch"] for row in rows if row.get("batch")}
    tokens: dict[str, list[float]] = {name: [] for name in batches}
    for index in range(options.repeats):
        for name in list(tokens)[:: -1 if index % 2 else 1]:
            size = batches[name]
            try:
                # It is known to fit. Peaks differ a little from run to run.
                trial = attempt(name, replace(work, batch_size=size), size, 2 * limit, 2 * options.steps)
            except Failed as error:
                trial = None
                say(f"{name} did not run at {size}: {error}")
            if trial is None:
                del tokens[name]
            else:
                tokens[name].append(size * work.seq_len / trial.seconds)
    for row in rows:
        found = tokens.get(row["engine"])
        if found:
            own = spread(found)
            row["batch_tokens"], row["batch_quartiles"] = round(own.median), f"{own.low:.0f}..{own.high:.0f}"
            row.update(ratios(paired(found, next(iter(tokens.values())))))
    return [
        {"engine": name, "batch": batches[name], "round": index, "tokens_per_second": round(value, 1)}
        for name, values in tokens.items()
        for index, value in enumerate(values)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engines one after the other, then in turn. Return 1 if none ran."""
    options = parse_arguments(arguments)
    work = workload_of(options, size="25M", seq_len=64)
    on_gpu = work.device == "cuda"
    memory = options.memory or (65536 if on_gpu else 560)
    title = (
        f"{memory} MiB for each of {work.processes} processes on {work.device}, sequences of {work.seq_len} tokens, "
        f"{work.precision}, {parameters_of(work) / 1e6:.1f} M parameters for the batch\n"
        f"{report.environment(work.device)}"
    )
    say(title)
    rows: list[dict[str, Any]] = []
    for name in options.engines or ENGINES + (OFFLOADING if on_gpu else []):
        try:
            rows.append(measure(name, work, memory * MEBIBYTE, options, rows[-1] if rows else {}))
        except Failed as error:
            say(f"{name} did not run: {error}")
            continue
        say(f"{name}: {rows[-1]}")
        report.write_csv(rows, options.output / "max_batch.csv")
    rounds = time_in_turn(rows, work, memory * MEBIBYTE, options)
    say(f"\n{report.table(rows, COLUMNS)}")
    report.write_csv(rows, options.output / "max_batch.csv")
    report.write_csv(rounds, options.output / "max_batch_rounds.csv")
    say(f"rows and rounds: {options.output}")
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
