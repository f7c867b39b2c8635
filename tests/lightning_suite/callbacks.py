"""Lightning's stock callbacks, and its tuner."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from lightning_shard import EMACallback
from tests.lightning_suite.features import rows
from tests.lightning_suite.loops import fitted
from tests.lightning_suite.stock import Net, Runs, cases, data, files, held_out, raised, weights


def rates(runs: Runs) -> Any:
    found = []
    for interval in ("step", "epoch", None):
        logger = CSVLogger(".", name=f"rates-{interval}", version=0)
        monitor = LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)
        found.append(fitted(runs, callbacks=[monitor], logger=logger, log_every_n_steps=1))
        found[-1]["lrs"] = monitor.lrs
        found[-1]["rows"] = rows(f"rates-{interval}/version_0")
        del found[-1]["metrics"]
    return found


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
    found: list[Any] = []
    for interval in ("batch", "epoch", "batch_and_epoch"):
        for keep in (True, False):
            writer = Writer(interval)
            trainer = runs.trainer(callbacks=[writer])
            found.append(trainer.predict(runs.seeded(), held_out(3), return_predictions=keep))
            found.append(writer.told)
    found.append(runs.trainer(limit_predict_batches=1).predict(runs.seeded(), held_out()))
    found.append(runs.trainer(limit_predict_batches=0).predict(runs.seeded(), held_out()))
    return found


def shown(runs: Runs) -> Any:
    found = [
        fitted(runs, callbacks=[each], enable_progress_bar=True)
        for each in (RichProgressBar(), TQDMProgressBar(refresh_rate=3))
    ]
    logger = CSVLogger(".", name="stats", version=0)
    found.append(fitted(runs, callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=logger))
    calls: list[str] = []
    called = LambdaCallback(
        on_train_epoch_end=lambda t, m: calls.append("epoch"),
        on_before_optimizer_step=lambda t, m, o: calls.append("step"),
    )
    found.append(fitted(runs, callbacks=[called]))
    return [found, calls]


def throughput(runs: Runs) -> Any:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0), window_size=4)
    logger = CSVLogger(".", name="throughput", version=0)
    found = fitted(runs, callbacks=[monitor], logger=logger, log_every_n_steps=2)
    found["rows"] = [
        {k: v for k, v in row.items() if k.endswith(("samples", "batches"))}
        for row in rows("throughput/version_0") or ()
    ]
    return found


class Spiking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e4 if self.global_step == 6 else loss


def spikes(runs: Runs) -> Any:
    class Own(SpikeDetection, pl.Callback):
        @torch.no_grad()
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            loss = outputs["loss"].detach()
            SpikeDetection.on_train_batch_end(self, trainer, loss, batch, batch_idx)

    return raised(
        lambda: fitted(
            runs, Spiking, callbacks=[Own(warmup=2, window=3, rtol=10, mode="min", exclude_batches_path="out.txt")]
        )
    )


class WithBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.body

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


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
