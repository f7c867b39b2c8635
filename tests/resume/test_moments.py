"""Checkpoints saved in any hook, of loaders that draw by themselves or are made anew."""

from __future__ import annotations

import random
import warnings
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_shard.registry import build
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.resume.support import StatefulStream


class Drawing(Dataset[Any]):
    """Draws from the global generators, and from one of its own."""

    def __init__(self, length: int) -> None:
        self.length, self.rng = length, random.Random(4)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.rng.random(), np.random.rand(), random.random()])

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])


def _loader(length: int = 8, **options: Any) -> Any:
    return DataLoader(Drawing(length), 2, **options)


def _shuffled() -> Any:
    return _loader(shuffle=True, generator=torch.Generator().manual_seed(2))


class Noted(pl.LightningModule):
    """Notes what its steps get, and what they draw from a generator of its own and from a global one."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders, self.layer = loaders, torch.nn.Linear(1, 1)
        self.events: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.loaders()

    def val_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0).tolist(), 2)

    def _note(self, *what: Any) -> None:
        self.events.append((*what, self.global_step, torch.rand(()).item(), random.random()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list) else [batch]
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self._note("train", batch_idx, [None if part is None else part.tolist() for part in parts], rate)
        return self.layer(torch.rand(1, 1)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._note("val", batch_idx)

    def on_train_epoch_end(self) -> None:
        self._note("epoch ends", self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(pl.Callback):
    """A checkpoint at each call of one hook; ``at`` is how many events were before it."""

    def __init__(self, hook: str) -> None:
        self.at: list[int] = []
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, module: Noted, *_: Any) -> None:
        self.at.append(len(module.events))
        trainer.save_checkpoint(f"{len(self.at)}.ckpt")


def _fit(loaders: Any, strategy: str, ckpt_path: str | None = None, **settings: Any) -> tuple[list[Any], list[str]]:
    pl.seed_everything(1, verbose=False)
    module = Noted(loaders)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "use_distributed_sampler": False, **settings}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy=build(strategy), **options).fit(module, ckpt_path=ckpt_path)
    return module.events, [str(warning.message) for warning in caught]


def _whole_and_rests(
    hook: str, numbers: list[int], loaders: Any, strategy: str = "shard_ddp", **settings: Any
) -> tuple[list[Any], list[str], list[int], list[list[Any]]]:
    saves, others = Saves(hook), settings.pop("callbacks", [])
    whole, said = _fit(loaders, strategy, callbacks=[saves, *deepcopy(others)], **settings)
    rests = []
    for number in numbers:
        rests += [_fit(loaders, strategy, f"{number}.ckpt", callbacks=deepcopy(others), **settings)[0]]
    return whole, said, [saves.at[number - 1] for number in numbers], rests


@pytest.mark.parametrize(
    ("hook", "numbers"),
    [
        ("on_train_batch_end", [2, 7]),
        ("on_train_epoch_start", [2]),
        ("on_validation_batch_end", [1]),
    ],
)
def test_a_save_in_any_hook_leaves_nothing_out(hook: str, numbers: list[int]) -> None:
    [(whole, said, starts, rests)] = run_distributed(_whole_and_rests, 1, hook, numbers, _shuffled)
    assert not any("in the middle of a training batch" in message for message in said)
    for start, rest in zip(starts, rests, strict=True):
        while whole[start - 1][0] == "val":  # runs again from its beginning
            start -= 1
        assert rest == whole[start:]


def _stream() -> Any:
    return DataLoader(StatefulStream(8), 2)


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 3}], ids=str)
def test_a_stream_goes_on_from_its_last_batch_with_a_validation_after_it(limits: dict[str, Any]) -> None:
    """The loop fetches one batch ahead of a stream without an end in sight, and none of a limited one."""
    run = ("on_train_batch_end", [3, 4, 5], _stream, "shard_ddp")
    [(whole, _, starts, rests)] = run_distributed(_whole_and_rests, 1, *run, max_steps=12, **limits)
    assert rests == [whole[start:] for start in starts]


def test_loaders_are_made_anew_in_the_epochs_in_which_they_would_have_been() -> None:
    run = ("on_train_batch_end", [4, 7], _shuffled)
    settings = {"reload_dataloaders_every_n_epochs": 2, "limit_val_batches": 0}
    [(whole, _, starts, rests)] = run_distributed(_whole_and_rests, 1, *run, **settings)
    assert rests == [whole[start:] for start in starts]


class Stops(pl.Callback):
    """Asks for a stop once, in the second batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 2


def test_a_stop_that_waits_comes_in_a_resumed_run_too() -> None:
    settings = {"callbacks": [Stops()], "min_steps": 6, "limit_val_batches": 0}
    run = ("on_train_batch_end", [1, 3], _shuffled)
    [(whole, _, starts, rests)] = run_distributed(_whole_and_rests, 1, *run, **settings)
    assert len(whole) == 8  # with the ends of two epochs
    assert rests == [whole[start:] for start in starts]


def test_a_run_that_was_stopped_goes_on_when_it_is_resumed() -> None:
    settings = {"callbacks": [Stops()], "min_steps": 2, "limit_val_batches": 0}
    run = ("on_train_end", [1], _shuffled)
    [(whole, _, _, [rest])] = run_distributed(_whole_and_rests, 1, *run, **settings)
    assert len(whole) == 5  # an epoch, which is the least
    assert len(rest) == 10


class Jitter(pl.Callback):
    def __init__(self) -> None:
        self.rng = random.Random(3)


class Own(Noted):
    def __init__(self, loaders: Any) -> None:
        super().__init__(loaders)
        self.noise = torch.Generator().manual_seed(6)


def _said() -> tuple[list[str], list[str]]:
    """What is said where a batch was begun, and of generators that nothing saves."""
    _, said = _fit(_shuffled, "shard_ddp", callbacks=[Saves("on_train_batch_start")], max_steps=2)
    pl.seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(
            strategy=build("shard_ddp"), max_steps=3, callbacks=[Jitter()], use_distributed_sampler=False
        )
        trainer.fit(Own(_shuffled), ckpt_path="1.ckpt")
    return said, [str(warning.message) for warning in caught]


def test_what_does_not_go_on_is_said() -> None:
    [(within, without)] = run_distributed(_said, 1)
    assert any("in the middle of a training batch" in message for message in within)
    [begin] = [message for message in without if "random number generators are in no checkpoint" in message]
    assert "start from the beginning: Own.noise, Jitter.rng." in begin
