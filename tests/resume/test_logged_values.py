"""Logged values after a resume are those of the run that was not interrupted, bit for bit, on stock Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_shard._lightning.results import _ResultCollection, _ResumedResults
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.resume.logged import BATCHES, EPOCHS, Distributed, Lines, Logs, draw, epoch_line, fit, loaders, saved_in


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lines, Logs, Path]:
    folder = tmp_path_factory.mktemp("runs")
    callbacks = [saved_in(folder, when) for when in ("batch", "validation", "epoch")]
    lines, module, _ = fit(callbacks=callbacks)
    return lines, module, folder


@pytest.mark.parametrize(
    ("when", "step"),
    [
        *(("batch", step) for step in (1, 2, 5, 8, 11, 16)),
        *(("validation", step) for step in (6, 12)),
        *(("epoch", step) for step in (6, 12)),
    ],
)
def test_the_resumed_run_logs_the_same(uninterrupted: tuple[Lines, Logs, Path], when: str, step: int) -> None:
    lines, module, folder = uninterrupted
    resumed, resumed_module, _ = fit(ckpt=folder / when / f"{step}.ckpt")
    expected = [(at, dict(m)) for at, m in lines.lines]
    # Lightning calls on_train_start again, in the epoch where the run goes on, and logs what it logs there.
    for run in (expected, resumed.lines):
        for _, metrics in run:
            metrics.pop("begun", None)
    count = len(resumed.lines)
    assert count > 3
    assert resumed.lines == expected[-count:]
    first = resumed.lines[0][0]
    # Nothing before the checkpoint is logged again, and the first line is that of the batch or epoch that follows.
    assert first in (step, step - 1)
    assert resumed_module.ever.compute() == module.ever.compute()
    assert resumed_module.val_best.compute() == module.val_best.compute()


def test_a_run_that_is_resumed_twice_in_an_epoch(uninterrupted: tuple[Lines, Logs, Path], tmp_path: Path) -> None:
    lines, _, folder = uninterrupted
    fit(ckpt=folder / "batch" / "8.ckpt", callbacks=[saved_in(tmp_path, "batch")])
    resumed, _, _ = fit(ckpt=tmp_path / "batch" / "9.ckpt")
    # "start" and "early" were logged before both checkpoints alone; on_train_start is called again.
    assert {**epoch_line(resumed, 1), "begun": 0} == {**epoch_line(lines, 1), "begun": 0}


def test_stock_lightning_loses_the_earlier_batches(uninterrupted: tuple[Lines, Logs, Path]) -> None:
    lines, _, folder = uninterrupted
    stock, _, _ = fit(ckpt=folder / "batch" / "8.ckpt", carry=False)
    ours, theirs = epoch_line(lines, 1), epoch_line(stock, 1)
    for name in ("loss_epoch", "sum", "acc_epoch", "own", "ever", "twice", "local"):
        assert ours[name] != theirs[name]
    for name in ("start", "early"):
        assert name in ours
        assert name not in theirs


def test_what_can_not_be_found_again_is_said() -> None:
    trainer: Any = SimpleNamespace(lightning_module=nn.Module())
    lost = {"grouped": False, "is_tensor": False, "attribute": "gone"}
    entries = {f"training_step.{name}": {**lost, "meta": {"name": name}} for name in ("one", "two")}
    entries["training_step.two"]["grouped"] = True
    with pytest.warns(UserWarning, match="one, two is not reported for this epoch"):
        assert not _ResumedResults(trainer, entries, so_far=_ResultCollection(training=True)).metrics(False)["callback"]


def test_a_checkpoint_of_the_last_batch_says_what_is_not_reported(uninterrupted: tuple[Lines, Logs, Path]) -> None:
    lines, _, folder = uninterrupted
    # Lightning itself goes on with the next epoch here.
    with pytest.warns(UserWarning, match="after the last batch of epoch 0 .* loss, twice, .* are not reported"):
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
    own = {"begun", "own"}  # reset by the module's hook at what it took for the epoch's end
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


@pytest.mark.parametrize("monitor", sampled(["loss_epoch", "early", "start"], 0))
@pytest.mark.parametrize(("when", "step"), [("batch", 8), ("validation", 12)])
def test_early_stopping_sees_the_whole_epoch(tmp_path: Path, monitor: str, when: str, step: int) -> None:
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


def _fits_twice(folder: Path) -> list[tuple[bool, int]]:
    """Whether a Trainer that has fitted before logs as one that was not interrupted, and how much."""
    keep, strategy = [saved_in(folder, when) for when in ("batch", "validation", "epoch")], build("shard_ddp")
    whole, _, _ = fit(callbacks=keep, carry=False, strategy=strategy)
    used, _, trainer = fit(carry=False, max_epochs=1, strategy=build("shard_ddp"))
    trainer.fit_loop.max_epochs, found = EPOCHS, []
    for path in ("batch/8", "batch/12", "validation/6", "epoch/6"):
        used.lines.clear()
        trainer.fit(Logs(), *loaders(1), ckpt_path=folder / f"{path}.ckpt")
        before = [(step, {**line, "begun": ""}) for step, line in whole.lines[-len(used.lines) :]]
        found.append(([(step, {**line, "begun": ""}) for step, line in used.lines] == before, len(before)))
    return found


def test_a_trainer_that_has_fitted_before_goes_on(tmp_path: Path) -> None:
    assert run_distributed(_fits_twice, 1, tmp_path) == [[(True, 14), (True, 10), (True, 17), (True, 16)]]


# Several processes


def _distributed_fit(folder: str, ckpt: str | None) -> list[tuple[int, dict[str, str]]]:
    callbacks = [] if ckpt else [saved_in(Path(folder), "batch"), saved_in(Path(folder), "validation")]
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


Whole = tuple[Path, list[list[tuple[int, dict[str, str]]]]]


@pytest.fixture(scope="module")
def whole_at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Whole]:
    """The uninterrupted run at a world size, with its checkpoints; made once."""

    @cache
    def run(world_size: int) -> Whole:
        folder = tmp_path_factory.mktemp("distributed")
        return folder, run_distributed(_distributed_fit, world_size, str(folder), None)

    return run


@pytest.mark.matrix
def test_two_processes_go_on_bitwise(whole_at: Callable[[int], Whole]) -> None:
    folder, whole = whole_at(2)
    assert whole[0][-1][1]["local"] != whole[1][-1][1]["local"]
    for ckpt in ("batch/8.ckpt", "validation/12.ckpt"):
        resumed = run_distributed(_distributed_fit, 2, str(folder), ckpt)
        for mine, expected in zip(resumed, whole, strict=True):
            for _, metrics in (*mine, *expected):
                metrics.pop("begun", None)
            assert mine == expected[-len(mine) :]
        assert len(resumed[0]) > 2


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("ckpt", "done"), sampled([("batch/8.ckpt", 2), ("validation/12.ckpt", 6)], 0))
def test_at_another_world_size_no_batch_is_lost(
    whole_at: Callable[[int], Whole], old: int, new: int, ckpt: str, done: int
) -> None:
    folder, _ = whole_at(old)
    resumed = run_distributed(_distributed_fit, new, str(folder), ckpt)
    lines = Lines()
    lines.lines = resumed[0]
    line = {name: float.fromhex(value) for name, value in epoch_line(lines, 1).items()}
    seen = [(b, rank) for b in range(BATCHES) for rank in range(old if b < done else new)]
    values = [draw(1, b, rank).item() for b, rank in seen]
    weights = [b + 1 for b, _ in seen]
    expected = {
        "loss_epoch": sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights),
        "sum": sum(values),
        "min": min(values),
        "max": max(values),
        "early": sum(v for v, (b, _) in zip(values, seen, strict=True) if b == 0) / old,
        "own": sum(values) / len(values),
        # Not synced: rank 0's.
        "start": draw(1, 1).item(),
    }
    # fp32 sums of at most 12 numbers, in another order.
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-6)
