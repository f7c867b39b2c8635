"""Metrics and logged values after a resume are those of the run that was not interrupted, bit for bit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from lightning_shard import _lightning
from lightning_shard.ranks import Ranks
from lightning_shard.resume.metrics import load_metric_states, metric_states
from lightning_shard.resume.progress import settle_progress
from tests.harness import run_distributed

BATCHES, EPOCHS = 6, 3


# Metrics of a module, without a Trainer


class Words(Metric):
    """A list state of strings, which torchmetrics itself has in its text metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx="cat")

    def update(self, word: str) -> None:
        self.words.append(word)

    def compute(self) -> int:
        return len(self.words)


class Weird(Metric):
    """A state that can't be saved without running code when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("things", [], dist_reduce_fx="cat")

    def update(self) -> None:
        self.things.append(object())

    def compute(self) -> int:
        return len(self.things)


class Zoo(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.mean, self.cat, self.peak = MeanMetric(), CatMetric(), MaxMetric()
        self.running = RunningMean(window=3)
        self.minmax = MinMaxMetric(BinaryAccuracy())
        # Both in one compute group, whose states are shared.
        self.collection = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)
        self.pearson = PearsonCorrCoef()
        self.composed = self.mean + self.peak
        self.words = Words()

    def feed(self, step: int) -> None:
        values = torch.rand(5, generator=torch.Generator().manual_seed(step))
        targets = (values.flip(0) > 0.5).int()
        for metric in (self.mean, self.cat, self.peak, self.running):
            metric.update(values)
        self.minmax(values, targets)
        self.collection.update(values, targets)
        if step % 2 == 0 or not self.tracker.n_steps:
            self.tracker.increment()
        self.tracker.update(values, targets.float())
        self.pearson.update(values, targets.float())
        self.words.update(f"word{step}")

    def results(self) -> list[Any]:
        singles = (self.mean, self.cat, self.peak, self.running, self.pearson, self.composed, self.words)
        values = [metric.compute() for metric in singles]
        values += [*self.minmax.compute().values(), *self.collection.compute().values(), self.tracker.compute_all()]
        return [value.tolist() if isinstance(value, Tensor) else value for value in values]


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_every_kind_of_metric_goes_on_bitwise() -> None:
    whole, first, second = Zoo(), Zoo(), Zoo()
    for step in range(7):
        whole.feed(step)
    for step in range(4):
        first.feed(step)
    expected_there = first.results()
    load_metric_states(second, [through_file(metric_states(first))], rank=0, world_size=1)
    assert second.results() == expected_there
    counts = {name: m.update_count for name, m in first.named_modules() if isinstance(m, Metric)}
    assert counts == {name: m.update_count for name, m in second.named_modules() if isinstance(m, Metric)}
    assert sum(counts.values()) > 20
    for step in range(4, 7):
        second.feed(step)
    assert second.results() == whole.results()


def test_saved_states_are_copies() -> None:
    zoo = Zoo()
    zoo.feed(0)
    states = metric_states(zoo)
    before = repr(states)
    zoo.feed(1)
    assert repr(states) == before != repr(metric_states(zoo))
    other = Zoo()
    load_metric_states(other, [states], rank=0, world_size=1)
    other.feed(1)
    assert repr(states) == before


def test_each_rank_gets_its_own_back() -> None:
    by_rank = []
    for rank in range(3):
        zoo = Zoo()
        zoo.feed(rank)
        by_rank.append(metric_states(zoo))
    for rank in range(3):
        zoo, expected = Zoo(), Zoo()
        expected.feed(rank)
        load_metric_states(zoo, by_rank, rank=rank, world_size=3)
        assert zoo.results() == expected.results()


class Mergeable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.mean, self.peak, self.cat = SumMetric(), MeanMetric(), MaxMetric(), CatMetric()
        self.collection = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.words = Words()

    def feed(self, rank: int) -> None:
        # Multiples of 1/8: sums are exact in any order.
        values = torch.arange(1, 5) / 8 + rank / 8
        for metric in (self.total, self.mean, self.peak, self.cat):
            metric.update(values)
        self.collection.update(values.clamp(max=1), torch.tensor([rank % 2, 1, 0, 1]))
        self.words.update(f"rank{rank}")

    def results(self) -> list[Any]:
        values = [self.total.compute(), self.mean.compute(), self.peak.compute(), *self.collection.compute().values()]
        return [*(value.item() for value in values), self.cat.compute().tolist(), self.words.words]


@pytest.mark.parametrize(("old", "new"), [(2, 1), (3, 2), (4, 2), (1, 2), (2, 3)])
def test_old_ranks_are_merged_at_another_world_size(old: int, new: int) -> None:
    by_rank = []
    for rank in range(old):
        module = Mergeable()
        module.feed(rank)
        by_rank.append(metric_states(module))
    for rank in range(new):
        module, expected = Mergeable(), Mergeable()
        # Left from before: it must not stay.
        module.feed(17)
        for old_rank in range(rank, old, new):
            expected.feed(old_rank)
        load_metric_states(module, by_rank, rank=rank, world_size=new)
        if rank < old:
            assert module.results() == expected.results()
        else:
            assert metric_states(module) == {
                name: {
                    **state,
                    "states": {k: v if isinstance(v, list) else pytest.approx(v) for k, v in state["states"].items()},
                }
                for name, state in metric_states(Mergeable()).items()
            }
        assert module.total.update_count == len(range(rank, old, new))


def test_mean_states_weigh_ranks_alike() -> None:
    class Average(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, value: float) -> None:
            self.average = torch.tensor(value)

        def compute(self) -> Tensor:
            return self.average

    by_rank = []
    for value in (1.0, 2.0, 6.0):
        module = nn.ModuleDict({"average": Average()})
        module["average"].update(value)
        module["average"].update(value)
        by_rank.append(metric_states(module))
    module = nn.ModuleDict({"average": Average()})
    load_metric_states(module, by_rank, rank=0, world_size=1)
    # As torchmetrics' own mean across ranks.
    assert module["average"].compute().item() == 3.0
    assert module["average"].update_count == 6


def test_what_cannot_be_merged_is_named_and_reset() -> None:
    by_rank = []
    for rank in range(2):
        zoo = Zoo()
        zoo.feed(rank)
        by_rank.append(metric_states(zoo))
    for rank, expected in ((0, 1), (1, 0)):
        zoo = Zoo()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_metric_states(zoo, [*by_rank, by_rank[0]], rank=rank, world_size=2)
        messages = [str(w.message) for w in caught if "start again" in str(w.message)]
        assert len(messages) == expected
        assert all("pearson can't be merged across ranks" in message for message in messages)
        assert zoo.pearson.update_count == 0
        assert zoo.mean.update_count == (2 if rank == 0 else 1)


def test_changed_code_warns_once_and_goes_on() -> None:
    old = nn.ModuleDict({"same": SumMetric(), "gone": SumMetric(), "retyped": SumMetric(), "resized": PerClass(3)})
    for metric in old.values():
        metric.update(2.0)
    new = nn.ModuleDict({"same": SumMetric(), "fresh": SumMetric(), "retyped": MeanMetric(), "resized": PerClass(4)})
    with pytest.warns(UserWarning, match="start again after resuming") as caught:
        load_metric_states(new, [metric_states(old)], rank=0, world_size=1)
    [message] = [str(w.message) for w in caught]
    for part in (
        "fresh is new",
        "gone is no longer in the module",
        "retyped has states ['mean_value', 'weight'], but ['sum_value'] were saved",
        "resized has a state per_class of shape (4,), but (3,) was saved",
    ):
        assert part in message
    assert "same" not in message
    assert new["same"].compute() == 2.0
    assert [new[name].update_count for name in ("fresh", "retyped", "resized")] == [0, 0, 0]


class PerClass(Metric):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add_state("per_class", torch.zeros(classes), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        self.per_class = self.per_class + value

    def compute(self) -> Tensor:
        return self.per_class


def test_a_state_of_other_objects_is_left_out_aloud() -> None:
    module = nn.ModuleDict({"weird": Weird(), "total": SumMetric()})
    module["weird"].update()
    with pytest.warns(UserWarning, match=r"weird \(object\)"):
        states = metric_states(module)
    assert list(through_file(states)) == ["total"]


def test_names_are_without_wrappers() -> None:
    module = nn.Module()
    module._orig_mod = nn.ModuleDict({"total": SumMetric()})
    assert list(metric_states(module)) == ["total"]


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
        mine = {"metrics": metric_states(pl_module), "results": _lightning.training_results_state(trainer)}
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
        settle_progress(self.lightning_module.trainer.fit_loop)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        if self.carried is None:
            return
        where = {"rank": self.global_rank, "world_size": self.world_size}
        load_metric_states(self.lightning_module, [state["metrics"] for state in self.carried], **where)
        results = [state["results"] for state in self.carried]
        _lightning.restore_training_results(self.lightning_module.trainer, results, **where)


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
    data = DataLoader(torch.ones(BATCHES * trainer.world_size, 1))
    trainer.fit(module, data, DataLoader(torch.ones(3 * trainer.world_size, 1)), ckpt_path=ckpt, weights_only=False)
    return lines, module, trainer


def epoch_line(lines: Lines, epoch: int) -> dict[str, str]:
    [line] = [
        metrics for _, metrics in lines.lines if "loss_epoch" in metrics and metrics["epoch"] == float(epoch).hex()
    ]
    return line


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


def test_stock_lightning_loses_the_earlier_batches(uninterrupted: tuple[Lines, Logs, Path]) -> None:
    lines, _, folder = uninterrupted
    stock, _, _ = fit(ckpt=folder / "batch" / "8.ckpt", carry=False)
    ours, theirs = epoch_line(lines, 1), epoch_line(stock, 1)
    for name in ("loss_epoch", "sum", "acc_epoch", "own", "ever", "twice", "local"):
        assert ours[name] != theirs[name]
    for name in ("start", "early"):
        assert name in ours
        assert name not in theirs


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


@pytest.mark.parametrize("monitor", ["loss_epoch", "early", "start"])
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


@pytest.mark.parametrize("plateau", ["loss_epoch/epoch", "val_loss/epoch", "val_loss/step", "loss_step/step"])
@pytest.mark.parametrize(("when", "step"), [("batch", 8), ("validation", 6), ("epoch", 6)])
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
@pytest.mark.parametrize(("ckpt", "done"), [("batch/8.ckpt", 2), ("validation/12.ckpt", 6)])
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
