"""Logging, optimizers and schedules, and layers that are made late."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from lightning_shard import EMACallback
from tests.lightning_suite.loops import fitted
from tests.lightning_suite.stock import Net, Runs, cases, data, held_out


def rows(folder: str) -> Any:
    torch.distributed.barrier()
    if torch.distributed.get_rank():
        return None
    with open(Path(folder, "metrics.csv")) as file:
        # Every column of the logger's is a number, and compared as one.
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def logged(runs: Runs, kind: Any, **flags: Any) -> Any:
    module = runs.seeded(kind)
    trainer = runs.trainer(
        **{"max_epochs": 2, "logger": CSVLogger(".", name=kind.__name__, version=0), "log_every_n_steps": 2, **flags}
    )
    trainer.fit(module, data(), [held_out(), held_out(3)] if kind is Suffixed else held_out())
    found = {
        "callback": trainer.callback_metrics,
        "logged": trainer.logged_metrics,
        "bar": {k: v for k, v in trainer.progress_bar_metrics.items() if k != "v_num"},
        "kept": module.seen,
    }
    return {**found, "rows": rows(f"{kind.__name__}/version_0")}


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()
        self.scores = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()])

    def on_train_start(self) -> None:
        self.log("at_start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.log("at_epoch", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("at_batch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        rank = self.global_rank
        self.log("own", loss)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True, batch_size=3 + rank)
        for name in ("mean", "sum", "max", "min"):
            self.log(name, float(batch_idx + rank), on_epoch=True, reduce_fx=name, sync_dist=True)
        self.log_dict({"x": loss.detach() * 2, "y": torch.tensor(rank)}, on_step=False, on_epoch=True, sync_dist=True)
        self.log("zero_alone", loss, rank_zero_only=True) if rank == 0 else None
        self.accuracy(loss.detach())
        self.log("metric", self.accuracy, on_step=True, on_epoch=True)
        self.scores.update(loss.detach())
        self.log("as_int", batch_idx, logger=False)
        self.log("quiet", loss, prog_bar=True, logger=False)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("at_batch_end", 2.0)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.scores.compute())
        self.scores.reset()
        self.log("at_epoch_end", torch.tensor(float(self.global_rank)), sync_dist=True)
        self.seen.append(sorted(self.trainer.callback_metrics))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)
        self.log("val_max", batch_idx + self.global_rank * 1.0, reduce_fx=torch.max, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", float(self.global_rank + 1), sync_dist=True, reduce_fx="sum")
        self.logger and self.logger.log_metrics({"direct": 1.0}, step=self.global_step)


class Suffixed(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), sync_dist=True, on_step=True, on_epoch=True)
        self.log(f"own_{dataloader_idx}", 1.0, add_dataloader_idx=False, sync_dist=True)


def values(runs: Runs) -> Any:
    return [logged(runs, Logging), logged(runs, Suffixed)]


# Optimizers and schedules


class Scheduled(Net):
    SCHEDULE: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return type(self).SCHEDULE(optimizer)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def _scheduled(make: Any) -> Any:
    return type("Own", (Scheduled,), {"SCHEDULE": staticmethod(make)})


def schedules(runs: Runs) -> Any:
    lr = torch.optim.lr_scheduler

    def told(scheduler: Any, **settings: Any) -> Any:
        return {"scheduler": scheduler, **settings}

    plateau = {"monitor": "train_loss_step", "interval": "step", "frequency": 4}
    kinds = [
        lambda o: ([o], [told(lr.StepLR(o, 1, 0.5), interval="step", frequency=3)]),
        lambda o: ([o], [lr.StepLR(o, 1, 0.5), told(lr.ExponentialLR(o, 0.9), interval="step")]),
        lambda o: ([o], [told(lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0), **plateau)]),
        lambda o: ([o], [told(lr.OneCycleLR(o, 0.5, total_steps=12), interval="step")]),
        lambda o: ([o], [lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 1), lr.ExponentialLR(o, 0.5)], [1])]),
    ]
    return [fitted(runs, _scheduled(make), max_epochs=3) for make in kinds]


def averages(runs: Runs) -> Any:
    average = EMAWeightAveraging if runs.is_stock else EMACallback
    return fitted(runs, callbacks=[average(decay=0.5)], max_epochs=3)


CASES = cases(__name__)
