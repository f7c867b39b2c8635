"""A checkpoint among the batches of one step, whose gradients none has: refused, or said where nothing goes on."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_shard.checkpoint.inspect import describe, open_any
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import CheckpointError
from lightning_shard.tools import convert
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences

STEPS, EVERY = 4, 4


class Saves(pl.Callback):
    """Saves after so many batches, or in the backward pass of the last of them."""

    def __init__(self, path: str, inside: bool, after: int, weights_only: bool = False) -> None:
        self.path, self.inside, self.after, self.weights_only = path, inside, after, weights_only

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path, weights_only=self.weights_only)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.inside:
            self._save(trainer)

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.inside:
            self._save(trainer)


class Stops(pl.Callback):
    """Ends the fit among the batches of a step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.fit_loop.total_batch_idx == 5


def fit(
    strategy: str, *callbacks: pl.Callback, resume: str | None = None, **settings: Any
) -> tuple[dict[str, Tensor], list[str], pl.Trainer]:
    """Some steps; whole parameters and optimizer state, and what was said of the batches of a step."""
    torch.manual_seed(3)
    final = Final()
    trainer = quiet_trainer(
        strategy=ENGINES[strategy](aligned=True),
        callbacks=[final, *callbacks],
        **{"max_steps": STEPS, "accumulate_grad_batches": EVERY, **settings},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TinyLM(dropout=0.1), loader(), ckpt_path=resume)
    said = [str(warning.message) for warning in caught if "batches of one step" in str(warning.message)]
    return {**final.parameters, **final.optimizer}, said, trainer


def _within(root: str, strategy: str) -> list[Any]:
    for inside in (False, True):
        with pytest.raises(CheckpointError, match=r"is called after [12] of the 4 batches of one step") as error:
            fit(strategy, Saves(f"{root}/a.ckpt", inside=inside, after=6))
    fit(strategy, Saves(f"{root}/weights.ckpt", inside=False, after=6, weights_only=True))
    _, _, trainer = fit(strategy, Stops())
    with pytest.warns(UserWarning, match="saved after 2 of the 4 batches of one step"):
        trainer.save_checkpoint(f"{root}/stopped.ckpt")
    on, _ = fit(strategy, Saves(f"{root}/whole.ckpt", inside=False, after=8))[:2]
    resumed, of_whole, _ = fit(strategy, resume=f"{root}/whole.ckpt")
    _, of_stopped, _ = fit(strategy, resume=f"{root}/stopped.ckpt")
    names = sorted(p.name for p in Path(root).iterdir())
    return [str(error.value), names, differences(on, resumed), of_whole, of_stopped]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero_2", marks=pytest.mark.matrix)])
def test_a_save_within_a_step_is_refused_while_the_fit_goes_on(tmp_path: Path, strategy: str) -> None:
    found = run_distributed(_within, 1, str(tmp_path), strategy)
    [[message, names, differing, of_whole, [of_stopped]]] = found
    assert "Save in on_train_batch_end of the last of them, by a ModelCheckpoint, which waits for that" in message
    assert names == ["stopped.ckpt", "weights.ckpt", "whole.ckpt"]
    assert not differing
    assert not of_whole
    assert "goes on after 2 batches of one step" in of_stopped


def _with_gradients(path: str) -> tuple[list[str], str]:
    fit("ddp", Saves(path, inside=False, after=8))
    older = f"{path}.older.ckpt"
    stored = open_any(path)
    gradients = {"gradient.head.weight": torch.ones(3), "rank_gradient.0.embed.weight": torch.ones(2)}
    write_portable(older, replace(stored, tensors={**stored.tensors, **gradients}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy="shard_fsdp").validate(TinyLM(), loader(shuffle=False), ckpt_path=older, verbose=False)
    convert(older, f"{path}.one.ckpt")
    return [str(each.message) for each in caught if "gradient" in str(each.message)], describe(older, open_any(older))


def test_gradients_in_an_older_checkpoint_are_not_read(tmp_path: Path) -> None:
    [(said, described)] = run_distributed(_with_gradients, 1, str(tmp_path / "a.ckpt"))
    assert not said
    assert "gradient.head.weight" in described


class Manual(TinyLM):
    """Steps after every second batch by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def _manual(path: str, saved: int) -> int:
    """How often a save after so many batches was warned of."""
    trainer = quiet_trainer(strategy="shard_ddp", max_steps=5, callbacks=[Saves(path, inside=False, after=saved)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Manual(), loader(count=40))
    return sum("after a manual_backward that no optimizer step" in str(each.message) for each in caught)


def test_manual_steps_that_are_not_complete_are_warned_of(tmp_path: Path) -> None:
    assert run_distributed(_manual, 1, str(tmp_path / "a.ckpt"), 9) == [1]
