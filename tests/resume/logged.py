"""A module that logs in every way, and its runs on stock Lightning with what this package resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    MetricCollection,
    SumMetric,
)
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from lightning_shard._lightning import loops
from lightning_shard._lightning.results import restore_training_results, training_results_state
from lightning_shard.ranks import Ranks
from lightning_shard.resume.metrics import load_metric_states, metric_states
from tests.resume.support import through_file

BATCHES, EPOCHS = 6, 3


# A whole run, on stock Lightning


def draw(*key: Any) -> Tensor:
    """A number that depends on ``key`` alone, with all its bits in use."""
    return torch.rand((), generator=torch.Generator().manual_seed(hash(key) % 2**31))


class Logs(pl.LightningModule):
    """Logs in all ways that there are; values depend on the epoch, the batch and the rank."""

    def __init__(self, plateau: str | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.plateau = plateau
        self.acc, self.both = BinaryAccuracy(), MetricCollection([BinaryAccuracy(), BinaryPrecision()], prefix="c_")
        self.own, self.ever, self.val_acc, self.val_best = MeanMetric(), SumMetric(), BinaryAccuracy(), MaxMetric()
        self.rates: list[tuple[int, float]] = []

    def on_train_start(self) -> None:
        self.val_best.reset()
        self.log("begun", 1.0, on_epoch=True, reduce_fx="sum")

    def on_train_epoch_start(self) -> None:
        self.log("start", draw(self.current_epoch, 1), on_step=False, on_epoch=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        key = (self.current_epoch, batch_idx, self.global_rank)
        value = draw(*key)
        self.rates.append((self.global_step, self.optimizers().param_groups[0]["lr"]))
        sync = {"sync_dist": True, "on_epoch": True}
        self.log("loss", value, on_step=True, batch_size=batch_idx + 1, **sync)
        self.log("twice", value, on_step=False, **sync)
        self.log("twice", value / 3, on_step=False, **sync)
        self.log("double", value.double() / 7, on_step=False, **sync)
        self.log("python", value.item() / 3, on_step=False, **sync)
        for reduce_fx in ("sum", "min", "max"):
            self.log(reduce_fx, value, on_step=False, reduce_fx=reduce_fx, **sync)
        self.log("local", value, on_step=False, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("rare", value, on_step=False, **sync)
        if batch_idx == 0:
            self.log("early", value, on_step=False, **sync)
        scores = torch.stack([draw(*key, i) for i in range(4)])
        targets = (torch.stack([draw(*key, -i) for i in range(4)]) > 0.5).int()
        self.acc(scores, targets)
        self.log("acc", self.acc, on_step=True, on_epoch=True)
        self.both.update(scores, targets)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        self.own.update(value)
        self.ever.update(value)
        return self.layer(batch).mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("hook", draw(self.current_epoch, self.global_step), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("own", self.own.compute())
        self.log("ever", self.ever.compute())
        self.own.reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        key = (self.current_epoch, self.global_step, batch_idx, self.global_rank)
        self.val_acc(draw(*key)[None], torch.ones(1, dtype=torch.int))
        self.log("val_acc", self.val_acc)
        self.log("val_loss", draw(*key), sync_dist=True)
        self.val_best.update(draw(*key))

    def on_validation_epoch_end(self) -> None:
        self.log("val_best", self.val_best.compute())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        if self.plateau is None:
            return optimizer
        monitor, _, interval = self.plateau.partition("/")
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": monitor, "interval": interval},
        }


class Lines(Logger):
    """What the logger was given: metrics by step, all bits."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, str]]] = []

    name = version = "lines"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.lines.append((step, {name: float(value).hex() for name, value in metrics.items()}))


class Carry(pl.Callback):
    """Puts into the checkpoint what the strategy under test is to restore."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        mine = {"metrics": metric_states(pl_module), "results": training_results_state(trainer, validates=False)}
        # Both torchmetrics' and Lightning's parts must pass as they are.
        checkpoint["carried"] = Ranks.of().gather(through_file(mine))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        trainer.strategy.carried = checkpoint["carried"]


class Restores:
    """The calls that a strategy has to make."""

    carried: list[dict[str, Any]] | None = None

    def process_dataloader(self, dataloader: Any) -> Any:
        loops.correct_loaded_counters(self.lightning_module.trainer)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        if self.carried is None:
            return
        where = {"rank": self.global_rank, "world_size": self.world_size}
        load_metric_states(self.lightning_module, [state["metrics"] for state in self.carried], **where)
        results = [state["results"] for state in self.carried]
        restore_training_results(self.lightning_module.trainer, results, rank=self.global_rank)


class Single(Restores, SingleDeviceStrategy):
    pass


class Distributed(Restores, DDPStrategy):
    pass


class Keep(ModelCheckpoint):
    """A stock one; several in a Trainer."""

    @property
    def state_key(self) -> str:
        return f"Keep{self.dirpath}"


def saved_in(folder: Path, when: str) -> ModelCheckpoint:
    """A callback that keeps every checkpoint of one kind of moment."""
    kinds: dict[str, dict[str, Any]] = {
        "batch": {"every_n_train_steps": 1},
        "validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        "epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    }
    return Keep(folder / when, filename="{step}", save_top_k=-1, auto_insert_metric_name=False, **kinds[when])


def fit(
    *, carry: bool = True, ckpt: Path | None = None, plateau: str | None = None, **kwargs: Any
) -> tuple[Lines, Logs, pl.Trainer]:
    """A run of EPOCHS epochs of BATCHES batches, without `carry` as stock Lightning has it."""
    lines, module = Lines(), Logs(plateau)
    callbacks = [*kwargs.pop("callbacks", []), *([Carry()] if carry else [])]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": Single(device="cpu") if carry else "auto",
        "max_epochs": EPOCHS,
        "limit_val_batches": 3,
        "logger": lines,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }
    trainer = pl.Trainer(callbacks=callbacks, **{**defaults, **kwargs})
    trainer.fit(module, *loaders(trainer.world_size), ckpt_path=ckpt, weights_only=False)
    return lines, module, trainer


def loaders(ranks: int) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    return DataLoader(torch.ones(BATCHES * ranks, 1)), DataLoader(torch.ones(3 * ranks, 1))


def epoch_line(lines: Lines, epoch: int) -> dict[str, str]:
    [line] = [
        metrics for _, metrics in lines.lines if "loss_epoch" in metrics and metrics["epoch"] == float(epoch).hex()
    ]
    return line
