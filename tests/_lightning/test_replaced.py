"""What is replaced on live Lightning objects is listed, and none of it is left when a run has ended or failed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelSummary,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_shard import EMACallback, ShardDDPStrategy, ShardDeepSpeedStrategy
from lightning_shard._lightning import REPLACED, Replacements
from lightning_shard.callbacks.throughput import ThroughputCallback
from lightning_shard.cluster.preemption import Preempted
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer

ABSENT = object()


class Loop:
    def __init__(self) -> None:
        self.max_steps = 4


def test_what_is_not_listed_is_not_replaced() -> None:
    assert len(REPLACED) <= 16, "look for a public hook, or refuse what needs another one"
    with pytest.raises(AssertionError, match=r"Loop\.max_steps is not in REPLACED"):
        Replacements().replace(Loop(), "max_steps", 5)


# Live runs


def _live(trainer: pl.Trainer) -> Iterator[Any]:
    yield from (trainer, trainer.profiler, trainer._signal_connector, trainer._checkpoint_connector)
    yield from (trainer._logger_connector, trainer._data_connector, trainer._callback_connector)
    fit = trainer.fit_loop
    yield from (fit, fit.epoch_loop, fit.epoch_loop.val_loop, fit.epoch_loop.automatic_optimization)
    yield from (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    kinds = ModelCheckpoint | ModelSummary
    yield from (c for c in trainer.callbacks if isinstance(c, kinds))
    yield from trainer.loggers
    yield from filter(None, [trainer.strategy.lightning_module])  # from the fit on


def _values(trainer: pl.Trainer) -> dict[tuple[str, int], Any]:
    """What each live object has of its own under a name in the table."""
    return {
        (f"{cls.__name__}.{name.split('.')[1]}", number): vars(thing).get(name.split(".")[1], ABSENT)
        for number, thing in enumerate(_live(trainer))
        for cls in type(thing).__mro__
        for name in REPLACED
        if name.startswith(f"{cls.__name__}.")
    }


def _ours(trainer: pl.Trainer) -> list[str]:
    """Functions and objects of this package that are attributes of Lightning's objects; callbacks' own state aside."""
    return [
        f"{type(thing).__name__}.{name}"
        for thing in _live(trainer)
        for name, value in vars(thing).items()
        if name not in ("to", "cpu", "cuda")  # of a sharded module, refused until `lightning_shard.unshard`
        for value in [value.func if isinstance(value, partial) else value]
        if (getattr(value, "__module__", None) or type(value).__module__).startswith("lightning_shard")
    ]


class Looks(pl.Callback):
    """Notes what differs during the run from what was before it."""

    def __init__(self) -> None:
        self.before: dict[Any, Any] = {}
        self.replaced: set[str] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = _values(trainer)
        self.replaced.update(key[0] for key in now if now[key] is not self.before.get(key, ABSENT))

    on_sanity_check_start = on_train_start = on_train_batch_start = on_validation_start = on_train_batch_end  # type: ignore


class Counts(ModelSummary):
    """Keeps the numbers that Lightning's table shows."""

    parameters: tuple[int, int]

    def summarize(self, _: Any, total_parameters: int, trainable_parameters: int, *__: Any, **___: Any) -> None:  # type: ignore[override]
        self.parameters = total_parameters, trainable_parameters


class Interrupted(TinyLM):
    """At one moment it fails, or is told to stop."""

    def __init__(self, fails_at: int | None = None, told_in_validation: int | None = None) -> None:
        super().__init__()
        self.fails_at, self.told_in_validation = fails_at, told_in_validation

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("as told")
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking and self.global_step == self.told_in_validation:
            os.kill(os.getpid(), signal.SIGUSR1)
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        """Saves wait for it."""

    def on_validation_end(self) -> None:
        """So do those after a validation."""


def _run(strategy: Any, module: TinyLM, ckpt_path: str | None = None, *more: Any, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    saves = ModelCheckpoint("saves", "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)
    looks, counts = Looks(), Counts()
    trainer = quiet_trainer(
        strategy=strategy,
        default_root_dir="runs",
        callbacks=[looks, saves, counts, ThroughputCallback(every_n_steps=1), *more],
        enable_checkpointing=True,
        enable_model_summary=True,
        num_sanity_val_steps=1,
        **{"max_epochs": 2, "limit_train_batches": 2, **settings},
    )
    looks.before = _values(trainer)
    ended = "well"
    try:
        trainer.fit(module, loader(4), loader(4, count=16, shuffle=False), ckpt_path=ckpt_path)
    except (RuntimeError, Preempted) as error:
        ended = type(error).__name__
    after = _values(trainer)
    return {
        "ended": ended,
        "replaced": looks.replaced,
        "left": [key[0] for key in after if after[key] is not looks.before.get(key, ABSENT)],
        "ours": _ours(trainer),
        "parameters": counts.parameters,
    }


def _runs() -> list[dict[str, Any]]:
    ddp = partial(ShardDDPStrategy, async_save=True)
    last_validation = {"max_steps": 2, "max_epochs": -1, "val_check_interval": 2}
    return [
        _run(ddp(), Interrupted(fails_at=3), limit_val_batches=0, logger=CSVLogger("logs")),
        # In mid-epoch, and where only the epoch's end is left.
        _run(ddp(), Interrupted(), "saves/step=1.ckpt", EMACallback()),
        _run(ddp(), Interrupted(), "saves/step=2.ckpt", limit_val_batches=0),
        _run(ddp(), Interrupted(told_in_validation=2), **last_validation),
        _run(ddp(), Interrupted(), **last_validation),
        _run(
            ShardDeepSpeedStrategy(stage=3, stage3={"param_persistence_threshold": 0}),
            Interrupted(),
            val_check_interval={"hours": 1},
        ),
    ]


def test_nothing_is_left_after_a_run() -> None:
    (runs,) = run_distributed(_runs, 1, timeout=240)
    assert [run["ended"] for run in runs] == ["RuntimeError", "well", "well", "Preempted", "well", "well"]
    for number, run in enumerate(runs):
        assert (run["left"], run["ours"]) == ([], []), number
        # ZeRO-3's own parameters have no element outside of their use.
        assert run["parameters"] == runs[0]["parameters"], number
    # Each entry of the table is seen in one of the runs.
    assert set(REPLACED) <= set().union(*(run["replaced"] for run in runs))
