"""What a run does in place of Lightning: errors come through, optimizers outlive a fit, one clock, full values."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard._lightning.loops import validate_by_one_clock
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


class Tested(TinyLM):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def resumed_after_test(name: str, folder: Path) -> set[float]:
    """Optimizer steps that the state knows of, of 3 in a fit, then a test, a save and 2 in another Trainer."""

    def trainer(steps: int) -> pl.Trainer:
        return quiet_trainer(strategy=name, max_steps=steps, default_root_dir=folder)

    first = trainer(3)
    first.fit(module := Tested(), loader())
    first.test(module, loader(), verbose=False)
    first.save_checkpoint(folder / "x.ckpt")
    (second := trainer(5)).fit(Tested(), loader(), ckpt_path=folder / "x.ckpt")
    found = {float(state["step"]) for state in second.optimizers[0].state.values()}
    trainer_of_zero = quiet_trainer(strategy="shard_deepspeed_stage_2", max_steps=1)
    trainer_of_zero.fit(module := Tested(), loader())
    trainer_of_zero.test(module, loader(), verbose=False)
    with warnings.catch_warnings(record=True) as told:
        trainer_of_zero.save_checkpoint(folder / "y.ckpt")
    said = "".join(str(warning.message) for warning in told)
    assert first.global_rank or "y.ckpt gets no optimizer state: under this strategy" in said
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", sampled(["shard_fsdp", "shard_ddp"], 0))
def test_a_checkpoint_saved_after_a_test_has_the_fits_optimizers(name: str, tmp_path: Path) -> None:
    assert run_distributed(resumed_after_test, 2, name, tmp_path) == [{5.0}, {5.0}]


class Fails(TinyLM):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            raise RuntimeError("as told")


def saved_after_an_error(folder: Path) -> tuple[list[str], list[str]]:
    callbacks: list[Any] = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, "{step}", save_on_exception=True)]
    trainer = quiet_trainer(strategy="shard_fsdp", callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as told, pytest.raises(RuntimeError, match="as told"):
        trainer.fit(Fails(), loader())
    trainer.strategy.barrier()
    return sorted(path.name for path in folder.glob("*")), [str(w.message) for w in told]


def test_a_save_after_an_error_hides_none_and_waits_for_none(tmp_path: Path) -> None:
    first, _ = run_distributed(saved_after_an_error, 2, tmp_path / "two")
    assert first[0] == []
    for name in ("on_exception.ckpt", "step=2.ckpt"):
        assert any(f"{name} is not saved after the error: rank 0 can't know" in said for said in first[1])


@pytest.mark.parametrize(("interval", "by_the_clock"), [("00:00:00:01", True), (3, False)])
def test_validation_by_the_clock_of_rank_0(interval: str | int, by_the_clock: bool) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, val_check_interval=interval, max_steps=1, **quiet)
    trainer.fit(BoringModel())  # its loop says by what a validation is due
    loop: Any = trainer.fit_loop.epoch_loop
    asked: list[bool] = []
    of_rank_0 = False

    def broadcast(here: bool) -> bool:
        asked.append(here)
        return of_rank_0

    agree = validate_by_one_clock(trainer, broadcast)
    agree()
    assert loop._should_check_val_fx(None) is False
    trainer._last_val_time = time.monotonic() - 100.0  # this rank's own clock
    agree()
    assert loop._should_check_val_fx(None) is False
    of_rank_0 = True
    agree()
    assert loop._should_check_val_fx(None) is by_the_clock
    assert asked == [False, True, True] * by_the_clock
