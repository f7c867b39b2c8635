"""Lightning's stock callbacks, and its tuner."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EMAWeightAveraging,
    LearningRateFinder,
)
from lightning.pytorch.tuner import Tuner

from lightning_shard import EMACallback
from tests.lightning_suite.loops import fitted
from tests.lightning_suite.stock import Runs, cases, data, files, held_out, weights


class Writer(BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.told: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.told.append(("batch", prediction, indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.told.append(("epoch", predictions, indices))


def predictions(runs: Runs) -> Any:
    writer = Writer("batch_and_epoch")
    kept = runs.trainer(callbacks=[writer]).predict(runs.seeded(), held_out(3), return_predictions=False)
    return [kept, writer.told, runs.trainer(limit_predict_batches=1).predict(runs.seeded(), held_out())]


def averages(runs: Runs) -> Any:
    average = EMAWeightAveraging if runs.is_stock else EMACallback
    return fitted(runs, callbacks=[average(decay=0.5)], max_epochs=3)


def tuned(runs: Runs) -> Any:
    module = runs.seeded()
    trainer = runs.trainer(max_epochs=1)
    finder = Tuner(trainer).lr_find(module, data(), min_lr=1e-4, max_lr=0.1, num_training=10, early_stop_threshold=None)
    found = {
        "rates": finder.results,
        "suggested": finder.suggestion(skip_begin=1, skip_end=1),
        "after": weights(module),
        "step": trainer.global_step,
    }
    module = runs.seeded()
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.1, num_training_steps=10, early_stop_threshold=None)
    trainer = runs.trainer(max_epochs=1, callbacks=[finder])
    trainer.fit(module, data(), held_out())
    return {**found, "lr": module.lr, "weights": weights(module), "files": files()}


CASES = cases(__name__)
