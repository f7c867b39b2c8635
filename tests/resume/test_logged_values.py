"""Logged values after a resume are those of the uninterrupted run, but for means of the epoch that it is within."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping

from tests.groups import sampled
from tests.harness import run_distributed
from tests.resume.logged import BATCHES, Distributed, Lines, Logs, epoch_line, fit, saved_in

BEGIN_AGAIN = [
    *("loss_epoch", "twice", "double", "python", "sum", "min", "max", "local"),
    *("rare", "early", "start", "hook"),
]
METRICS = {"acc_epoch", "c_BinaryAccuracy", "c_BinaryPrecision"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lines, Logs, Path]:
    folder = tmp_path_factory.mktemp("runs")
    callbacks = [saved_in(folder, when) for when in ("batch", "validation", "epoch")]
    lines, module, _ = fit(callbacks=callbacks)
    return lines, module, folder


@pytest.mark.parametrize(
    ("when", "step"),
    [
        *(("batch", step) for step in (1, 8, 11, 16)),
        *(("validation", step) for step in (6, 12)),
        *(("epoch", step) for step in (6, 12)),
    ],
)
def test_the_resumed_run_logs_the_same(uninterrupted: tuple[Lines, Logs, Path], when: str, step: int) -> None:
    lines, module, folder = uninterrupted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, resumed_module, _ = fit(ckpt=folder / when / f"{step}.ckpt")
    said, ended = (
        [each for each in caught if text in str(each.message)]
        for text in (
            "in the middle of epoch",
            f"last batch of epoch {step // BATCHES - 1} and before its end",
        )
    )
    expected = [(at, dict(m)) for at, m in lines.lines]
    # Lightning calls on_train_start again, in the epoch where the run goes on, and logs what it logs there.
    for run in (expected, resumed.lines):
        for _, metrics in run:
            metrics.pop("begun", None)
    count = len(resumed.lines)
    assert count > 3
    epoch = (step - (when == "validation")) // BATCHES
    if when != "epoch":
        # Means of this epoch begin again; not those of metrics, nor others that are logged at its end.
        [mine], [theirs] = ([m for _, m in run if "own" in m and m["epoch"] == float(epoch).hex()] for run in
                            (resumed.lines, expected))  # fmt: skip
        again = {name for name, value in theirs.items() if value != mine.get(name)}
        lost = METRICS if when == "validation" else set()
        assert {"loss_epoch", "sum", *lost} <= again <= {*BEGIN_AGAIN, *lost}
        for name in again:
            mine.pop(name, None)
            del theirs[name]
    assert len(said) == (when == "batch")
    assert len(ended) == (when == "validation")
    assert resumed.lines == expected[-count:]
    first = resumed.lines[0][0]
    # Nothing before the checkpoint is logged again, and the first line is that of the batch or epoch that follows.
    assert first in (step, step - 1)
    assert resumed_module.ever.compute() == module.ever.compute()
    assert resumed_module.val_best.compute() == module.val_best.compute()


def test_a_checkpoint_of_the_last_batch_says_what_is_not_reported(uninterrupted: tuple[Lines, Logs, Path]) -> None:
    lines, _, folder = uninterrupted
    # Lightning itself goes on with the next epoch here.
    with pytest.warns(UserWarning, match="after the last batch of epoch 0 .* loss, twice, .* are not logged"):
        resumed, _, _ = fit(ckpt=folder / "batch" / "6.ckpt")
    # `own` and `ever` are reset and never reset by the module's own hook, which has not run.
    mine = {name: value for name, value in epoch_line(resumed, 1).items() if name not in ("begun", "own", "ever")}
    assert {name: epoch_line(lines, 1)[name] for name in mine} == mine
    assert len(mine) == 15


def test_a_run_ended_in_mid_epoch_by_max_steps_goes_on(uninterrupted: tuple[Lines, Logs, Path], tmp_path: Path) -> None:
    lines, _, _ = uninterrupted
    _, _, trainer = fit(callbacks=[saved_in(tmp_path, "epoch")], max_steps=8, max_epochs=-1)
    assert trainer.global_step == 8
    resumed, _, _ = fit(ckpt=tmp_path / "epoch" / "8.ckpt")
    # The last is reset by the module's hook at what it took for the epoch's end.
    own = {*BEGIN_AGAIN, "begun", "own"}
    assert {k: v for k, v in epoch_line(resumed, 1).items() if k not in own} == {
        k: v for k, v in epoch_line(lines, 1).items() if k not in own
    }


class Watched(EarlyStopping):
    def __init__(self, monitor: str) -> None:
        super().__init__(monitor, patience=1, min_delta=0.0, mode="min", check_on_train_epoch_end=True)
        self.scores: list[str] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scores.append(float(trainer.callback_metrics[self.monitor]).hex())
        super().on_train_epoch_end(trainer, pl_module)


@pytest.mark.parametrize("monitor", sampled(["loss_epoch", "acc_epoch", "early", "start"], 0, 1))
def test_early_stopping_sees_the_whole_epoch_after_its_last_batch(tmp_path: Path, monitor: str) -> None:
    when, step = "validation", 12
    first, second = Watched(monitor), Watched(monitor)
    _, _, trainer = fit(callbacks=[first, saved_in(tmp_path, when)], max_epochs=6)
    _, _, resumed = fit(callbacks=[second], max_epochs=6, ckpt=tmp_path / when / f"{step}.ckpt")
    assert first.scores[1:] == second.scores
    assert len(set(first.scores)) == len(first.scores) > 1
    assert (first.wait_count, first.stopped_epoch, trainer.global_step) == (
        second.wait_count,
        second.stopped_epoch,
        resumed.global_step,
    )
    assert float(first.best_score).hex() == float(second.best_score).hex()


@pytest.mark.parametrize(
    "plateau", sampled(["loss_epoch/epoch", "val_loss/epoch", "val_loss/step", "loss_step/step"], 2)
)
@pytest.mark.parametrize(("when", "step"), sampled([("batch", 8), ("validation", 6), ("epoch", 6)], 0, 1))
def test_plateau_schedulers_go_on(tmp_path: Path, plateau: str, when: str, step: int) -> None:
    if (plateau, when) == ("loss_epoch/epoch", "batch"):
        when, step = "validation", 12  # else it is the mean of the epoch's rest
    kwargs: dict[str, Any] = {"plateau": plateau, "max_epochs": 5}
    if plateau == "val_loss/step":
        # Before the first validation there is nothing to monitor.
        kwargs["num_sanity_val_steps"] = 0
        kwargs["val_check_interval"] = 1
        kwargs["limit_val_batches"] = 1
    _, whole, _ = fit(callbacks=[saved_in(tmp_path, when)], **kwargs)
    path = tmp_path / when / f"{step}.ckpt"
    _, resumed, _ = fit(ckpt=path, **kwargs)
    assert len({rate for _, rate in whole.rates[step:]}) > 1
    assert resumed.rates == whole.rates[step:]


# Several processes


def _distributed_fit(folder: str, ckpt: str | None) -> list[tuple[int, dict[str, str]]]:
    callbacks = [] if ckpt else [saved_in(Path(folder), "epoch")]
    lines, module, trainer = fit(
        strategy=Distributed(),
        devices=dist.get_world_size(),
        callbacks=callbacks,
        ckpt=Path(folder) / ckpt if ckpt else None,
    )
    assert trainer.world_size == dist.get_world_size()
    # What only this rank has; loggers exist on rank 0 alone.
    extra = {"own": module.ever.compute().item().hex(), "local": float(trainer.callback_metrics["local"]).hex()}
    return [*lines.lines, (-1, extra)]


@pytest.mark.matrix
def test_two_processes_go_on_bitwise(tmp_path: Path) -> None:
    whole = run_distributed(_distributed_fit, 2, str(tmp_path), None)
    assert whole[0][-1][1]["local"] != whole[1][-1][1]["local"]
    resumed = run_distributed(_distributed_fit, 2, str(tmp_path), "epoch/12.ckpt")
    for mine, expected in zip(resumed, whole, strict=True):
        for _, metrics in (*mine, *expected):
            metrics.pop("begun", None)
        assert mine == expected[-len(mine) :]
    assert len(resumed[0]) > 2
