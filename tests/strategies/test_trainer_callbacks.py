"""Lightning's stock callbacks and torchmetrics on sharded and replicated modules: they work, or say why not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters
from tests.strategies.indexed import ALL, BOTH, ROUNDING, Indexed, build, data, refusal

CLASSES, COUNT = 3, 22


def images() -> TensorDataset:
    x = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, torch.arange(COUNT) % CLASSES)


class Classifier(pl.LightningModule):
    """Metrics of every stage in the module; a rate of 0 keeps its predictions what they are."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_scores = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro"),
                "matrix": torchmetrics.ConfusionMatrix("multiclass", num_classes=CLASSES),
            }
        )
        self.mean = torchmetrics.MeanMetric()
        self.tracked = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)
        self.lr = lr
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def on_train_epoch_start(self) -> None:
        self.tracked.increment()  # copies the metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.tracked.update(logits)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_epoch=True, on_step=False)
        return functional.cross_entropy(logits.float(), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_scores.update(logits, y)
        self.mean.update(functional.cross_entropy(logits.float(), y), weight=len(y))
        self.log("val_loss", self.mean)

    def on_validation_epoch_end(self) -> None:
        scores = self.val_scores.compute()
        self.val_scores.reset()
        self.log("val_accuracy", scores["accuracy"])
        self.notes.append(scores["matrix"].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.backbone.parameters(), *self.head.parameters()], lr=self.lr)


def _metrics(strategy: str, precision: str) -> dict[str, Any]:
    pl.seed_everything(4, verbose=False)
    module = Classifier()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=2)
    loader = DataLoader(images(), batch_size=3)
    trainer.fit(module, loader, loader)
    # Metric states keep the dtype that they were made with, whatever the module computes in.
    assert module.mean.mean_value.dtype == torch.float32
    return {"logged": {k: v.item() for k, v in trainer.callback_metrics.items()}, "matrix": module.notes}


@ALL
def test_metrics_in_the_module_count_the_samples_of_all_ranks(strategy: str, precision: str) -> None:
    one, other = run_distributed(_metrics, 2, strategy, precision)
    assert one == other
    torch.manual_seed(4)
    module = Classifier().to(torch.bfloat16 if precision == "bf16-mixed" else torch.float32)
    x, y = images().tensors
    with torch.no_grad():
        logits = module(x.to(module.head.weight.dtype))
    guesses = logits.argmax(-1)
    matrix = [[int(((y == i) & (guesses == j)).sum()) for j in range(CLASSES)] for i in range(CLASSES)]
    # 22 samples are 11 for each rank: none is repeated.
    assert one["matrix"][1:] == [matrix, matrix]
    assert one["logged"]["train_accuracy"] == pytest.approx((guesses == y).float().mean().item())
    recalls = [matrix[i][i] / sum(matrix[i]) for i in range(CLASSES)]
    assert one["logged"]["val_accuracy"] == pytest.approx(sum(recalls) / CLASSES)
    expected = functional.cross_entropy(logits.float(), y).item()
    assert one["logged"]["val_loss"] == pytest.approx(expected, rel=ROUNDING[precision])


# Stopping


class Diverging(Indexed):
    """What it monitors stops falling on rank 1 alone, after epoch 1."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        worse = self.global_rank == 1 and self.current_epoch > 1
        self.log("own_loss", 10.0 if worse else 10.0 - self.current_epoch)


def _early(strategy: str, precision: str) -> tuple[int, int]:
    pl.seed_everything(1, verbose=False)
    stop = EarlyStopping("own_loss", patience=1)
    trainer = quiet_trainer(strategy=strategy, precision=precision, callbacks=[stop], num_sanity_val_steps=0)
    trainer.fit(Diverging(), data(), data())
    return trainer.current_epoch, trainer.global_step


@ALL
def test_early_stopping_stops_all_ranks_together(strategy: str, precision: str) -> None:
    assert run_distributed(_early, 2, strategy, precision) == [(3, 18)] * 2


# Learning rates


class TwoRates(Indexed):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [{"params": self.body.parameters(), "lr": 0.1}, {"params": self.head.parameters()}], lr=0.2
        )
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}]


def _monitored(strategy: str) -> Any:
    pl.seed_everything(1, verbose=False)
    monitor = LearningRateMonitor("step")
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=2,
        callbacks=[monitor],
        logger=CSVLogger(".", name="log", version=0),
        log_every_n_steps=1,
    )
    trainer.fit(TwoRates(), data())
    dist.barrier()
    with open("log/version_0/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["lr-SGD/pg1"]]
    return [(float(row["lr-SGD/pg1"]), float(row["lr-SGD/pg2"])) for row in rows]


@BOTH
def test_learning_rate_monitor(strategy: str) -> None:
    for rates in run_distributed(_monitored, 2, strategy):
        assert rates == [(0.1, 0.2)] * 6 + [(0.05, 0.1)] * 6


def _found(strategy: str, precision: str) -> dict[str, Any]:
    module = build(lr=0.5)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.3, num_training_steps=24, early_stop_threshold=None)
    at_start: dict[str, Tensor] = {}
    module.on_train_start = lambda: at_start.update(whole_parameters(module))
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=3, callbacks=[finder])
    trainer.fit(module, data(), data())
    return {
        "lr": module.lr,
        "used": trainer.optimizers[0].param_groups[0]["lr"],
        "tried": len(finder.optimal_lr.results["lr"]),
        "restored": all(torch.equal(start[name], at_start[name]) for name in start),
        "steps": trainer.global_step,
        "left": sorted(path.name for path in Path.cwd().glob(".lr_find*")),
    }


@ALL
def test_learning_rate_finder(strategy: str, precision: str) -> None:
    one, other = run_distributed(_found, 2, strategy, precision)
    assert one == other
    assert one["tried"] == 24
    assert one["lr"] == one["used"] != 0.5
    assert (one["restored"], one["steps"], one["left"]) == (True, 3, [])


def _batch_size(strategy: str) -> None:
    module = build()
    module.batch_size = 2
    quiet_trainer(strategy=strategy, callbacks=[BatchSizeFinder()], max_steps=1).fit(module, data())


@BOTH
def test_batch_size_finder_is_refused(strategy: str) -> None:
    for kind, message in run_distributed(refusal, 2, _batch_size, strategy):
        assert kind == "ConfigurationError"
        assert "Use lightning_shard.callbacks.BatchSizeCallback" in message


# What is shown


def _shown(strategy: str) -> Any:
    module = build()
    flags = {"strategy": strategy, "max_epochs": 1, "enable_progress_bar": True, "enable_model_summary": True}
    quiet_trainer(**flags, callbacks=[RichProgressBar(), RichModelSummary()]).fit(build(), data(), data())
    quiet_trainer(**flags, callbacks=[TQDMProgressBar(), ModelSummary(2)]).fit(module, data(), data())
    counted = summarize(module)
    return counted.total_parameters, counted.trainable_parameters, sum(p.numel() for p in Indexed().parameters())


@BOTH
def test_summaries_and_progress_bars(strategy: str) -> None:
    pytest.importorskip("rich")
    for total, trainable, expected in run_distributed(_shown, 2, strategy):
        assert total == trainable == expected


# What changes single elements


def _pruned(strategy: str, precision: str, **flags: Any) -> dict[str, Tensor]:
    module = build()
    pruned = [(module.body[0], "weight"), (module.body[2], "weight")]
    callback = ModelPruning("l1_unstructured", pruned, amount=0.5, use_lottery_ticket_hypothesis=False)
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=3, callbacks=[callback], **flags)
    trainer.fit(module, data(), data())
    return whole_parameters(module)


def test_pruning_works_where_parameters_are_whole() -> None:
    one, other = run_distributed(_pruned, 2, "shard_ddp", "32-true")
    assert all(torch.equal(one[name], other[name]) for name in one)
    zeros = sum(int((one[f"body.{i}.weight"] == 0).sum()) for i in (0, 2))
    # Half of what is left, in each of three epochs.
    assert zeros == (24 + 64) * (1 - 0.5**3)


def test_pruning_is_refused_where_parameters_are_cut() -> None:
    for strategy, precision in (("shard_fsdp", "32-true"), ("shard_ddp", "bf16-mixed")):
        for error, message in run_distributed(refusal, 2, _pruned, strategy, precision):
            assert error == "ConfigurationError"
            assert "works on full parameters, which Shard" in message


def test_pruning_is_refused_where_it_rewrites_checkpoints() -> None:
    for error, message in run_distributed(refusal, 2, _pruned, "shard_ddp", "32-true", enable_checkpointing=True):
        assert error == "ConfigurationError"
        assert "saves other tensors than the module's own" in message
