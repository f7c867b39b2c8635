"""Logged values after a resume are those of the uninterrupted run, but for means of the epoch that it is within."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from tests.harness import run_distributed
from tests.models import quiet_trainer

BATCHES, EPOCHS = 6, 4


def draw(*key: int) -> Tensor:
    """Numbers that depend on ``key`` alone."""
    return torch.rand(5, generator=torch.Generator().manual_seed(hash(key) % 2**31))


class Logs(pl.LightningModule):
    """Logs means and metrics, and keeps what its epochs and validations came to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.acc, self.val_acc, self.best, self.own = BinaryAccuracy(), BinaryAccuracy(), MaxMetric(), BinaryPrecision()
        self.epochs: list[dict[str, float]] = []
        self.validations: list[tuple[int, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        values = draw(self.current_epoch, batch_idx)
        targets = (values.flip(0) > 0.5).int()
        self.acc(values, targets)
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        self.own.update(values, targets)
        self.log("mean", values[0], on_step=True, on_epoch=True)
        return self.layer(batch).mean()

    def on_train_epoch_end(self) -> None:
        self.log("own", self.own.compute())
        self.own.reset()
        self.epochs.append({name: float(self.trainer.callback_metrics[name]) for name in ("acc", "mean_epoch", "own")})

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        values = draw(self.global_step, -1 - batch_idx)
        self.val_acc(values, (values.flip(0) > 0.5).int())
        self.log("val_acc", self.val_acc)
        self.log("val_loss", values[0])
        self.best.update(values)

    def on_validation_end(self) -> None:
        self.validations.append((self.global_step, float(self.trainer.callback_metrics["val_acc"])))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _fit(root: str, ckpt_path: str | None = None) -> dict[str, Any]:
    stopping = EarlyStopping("acc", mode="max", patience=9, check_on_train_epoch_end=True)
    kinds: dict[str, Any] = {
        "batch": {"every_n_train_steps": 1},
        "validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    }
    saves = [ModelCheckpoint(f"{root}/{name}", "{step}", save_top_k=-1, **kind) for name, kind in kinds.items()]
    trainer = quiet_trainer(
        strategy="shard_ddp", max_epochs=EPOCHS, num_sanity_val_steps=0, enable_checkpointing=ckpt_path is None,
        callbacks=[stopping, *(saves if ckpt_path is None else [])],
    )  # fmt: skip
    module = Logs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.ones(BATCHES, 1)), DataLoader(torch.ones(2, 1)), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    said = [str(each.message) for each in caught if " of epoch " in str(each.message)]
    stopped = stopping.wait_count, float(stopping.best_score)
    return {"epochs": module.epochs, "validations": module.validations, "said": said, "stopping": stopped,
            "best": float(module.best.compute())}  # fmt: skip


def _runs(root: str) -> list[dict[str, Any]]:
    saves = ("batch/step=8", "batch/step=6", "validation/step=6")
    return [_fit(root), *(_fit(root, f"{root}/{name}.ckpt") for name in saves)]


def test_a_resumed_run_logs_the_same(tmp_path: Any) -> None:
    [(whole, middle, last, validated)] = run_distributed(_runs, 1, str(tmp_path))
    assert len({values["acc"] for values in whole["epochs"]}) > 1
    assert whole["said"] == []
    # Of the last batch, the first with the validation still to come.
    for resumed, since in ((last, 0), (validated, 1)):
        [said] = resumed["said"]
        assert "after the last batch of epoch 0 and before its end: its values of acc, mean are not logged" in said
        assert resumed["epochs"] == whole["epochs"]
        assert resumed["validations"] == whole["validations"][since:]
    # The mean begins again in mid-epoch, metrics go on.
    assert middle["epochs"][0].pop("mean_epoch") != whole["epochs"][1].pop("mean_epoch")
    assert middle["epochs"] == whole["epochs"][1:]
    [said] = middle["said"]
    assert "in the middle of epoch 1: of mean the epoch's values, which are in no checkpoint, begin again here" in said
    assert middle["validations"] == whole["validations"][1:]
    for resumed in (middle, last, validated):
        assert (resumed["stopping"], resumed["best"]) == (whole["stopping"], whole["best"])
