"""A run of `finetune`, as its processes see it: the task, its clocks, a trial of a batch, and the training."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

import lightning_shard  # noqa: F401  (registers the strategies)
from examples.benchmarks.limits import MemoryLimit, Trial, is_out_of_memory
from examples.benchmarks.processes import Place, run_processes
from examples.classifier import TextClassifier
from examples.docstrings import PACKAGES, PythonDocstrings


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
    """Docstrings of each part."""
    epochs: int = 1
    lr: float = 1e-4
    """At 32 samples in a batch of all processes."""

    @property
    def scaled_lr(self) -> float:
        """The learning rate at this batch, by the square root, as is usual for Adam: a larger one takes fewer steps."""
        return self.lr * math.sqrt(self.batch_size * self.processes / 32)


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
    """Seconds of each epoch's training and evaluation, and the accuracy after it."""

    def __init__(self, place: Place) -> None:
        """Nothing runs yet."""
        self._place = place
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The epoch begins."""
        self._place.meet()
        self._start = self._place.now()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training ends, for this epoch."""
        now = self._place.now()
        self.epochs.append({"train_seconds": now - self._start})
        self._start = now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation ends."""
        self.epochs[-1]["evaluation_seconds"] = self._place.now() - self._start
        for name in ("accuracy", "f1"):
            self.epochs[-1][name] = float(trainer.callback_metrics[f"val_{name}"])


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
    """Train. All ranks call it."""
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
    data = PythonDocstrings(run.encoder, max_length=run.max_length, batch_size=run.batch_size, limit=run.limit)
    trainer.fit(Classifier(run.encoder, classes=len(PACKAGES), lr=run.scaled_lr), data)
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
    """A trial in new processes, None if it does not fit."""
    found = run_processes(trial, strategy, run, limit, processes=run.processes, device=run.device)
    if None in found:
        return None
    return Trial(size=run.batch_size, peak=found[0][0], seconds=max(seconds for _, seconds in found))


def train(place: Place, strategy: str, run: FineTuning) -> dict[str, Any]:
    """Each epoch's times and accuracy, and the number of samples in one. All ranks call it."""
    watch = Stopwatch(place)
    trainer = fit(strategy, run, watch, max_epochs=run.epochs)
    return {"epochs": watch.epochs, "samples": trainer.num_training_batches * run.batch_size * run.processes}
