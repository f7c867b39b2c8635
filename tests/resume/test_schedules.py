"""Hyperparameters that differ on resume: it is said once whose win, and an option decides."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim import lr_scheduler

from lightning_shard import CheckpointMismatchError, ShardDDPStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


class Scheduled(TinyLM):
    def __init__(self, lr: float, gamma: float) -> None:
        super().__init__()
        self.settings: tuple[float, Any] = lr, gamma

    def configure_optimizers(self) -> Any:
        lr, gamma = self.settings
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=lr)
        if callable(gamma):
            schedule: Any = lr_scheduler.LambdaLR(optimizer, gamma)
        else:
            schedule = lr_scheduler.ExponentialLR(optimizer, gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _fit(strategy: Any, lr: float, gamma: Any, steps: int, ckpt_path: str | None = None, **flags: Any) -> Any:
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, **flags)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Scheduled(lr, gamma), loader(), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint("a.ckpt")
    group = trainer.optimizers[0].param_groups[0]
    said = [str(each.message) for each in caught]
    said = [text for text in said if "hyperparameters win" in text or "schedules" in text]
    return group["lr"], group["weight_decay"], said


def _runs() -> list[Any]:
    _fit("shard_ddp", 0.5, 0.5, 2)
    configured = ShardDDPStrategy(resume_hyperparameters="configuration")
    resumed = [(strategy, 0.25, 0.75) for strategy in ("shard_ddp", configured)]
    found = [_fit(*settings, 3, "a.ckpt") for settings in [("shard_ddp", 0.5, 0.5), *resumed]]
    other = ("shard_ddp", 0.5, lambda steps: 0.5 / (1 + steps), 3, "a.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"schedules were ExponentialLR when .* and are LambdaLR here"):
        _fit(*other)
    with pytest.MonkeyPatch.context() as patched:
        hook = lambda _, checkpoint: checkpoint.update(lr_schedulers=[])  # noqa: E731
        patched.setattr(Scheduled, "on_load_checkpoint", hook)
        return [*found, _fit(*other)]


def test_whose_win_is_said_and_can_be_chosen() -> None:
    [(same, saved, own, other)] = run_distributed(_runs, 1)
    assert same == (0.5**4, 0.5, [])
    assert saved[:2] == same[:2]
    assert saved[2] == [
        "The checkpoint's hyperparameters win: lr of group 0 of optimizer 0 is 0.125, not 0.25; weight_decay of group "
        "0 of optimizer 0 is 0.5, not 0.25; gamma of schedule 0 is 0.5, not 0.75 as configured. Set "
        "resume_hyperparameters: configuration on the strategy for those."
    ]
    # A quarter of it is left after the two steps before.
    assert own[:2] == (pytest.approx(0.25 * 0.25 * 0.75), 0.25)
    assert own[2] == [
        "The configuration's hyperparameters win: lr of group 0 of optimizer 0 is 0.0625, not 0.125; weight_decay of "
        "group 0 of optimizer 0 is 0.25, not 0.5; gamma of schedule 0 is 0.75, not 0.5 as in the checkpoint."
    ]
    # Of another class, which begins anew.
    assert other[:2] == (0.5 * 0.5 / 2, 0.5)


class Plateau(TinyLM):
    """Halves its rate in each epoch in which what is monitored has not fallen; it falls by the loss, or the hook."""

    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.monitor, self.rates = monitor, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name, value in (("falling", 8.0 - self.current_epoch), ("rising", float(self.current_epoch))):
            self.log(name, value, on_step=False, on_epoch=True, sync_dist=True)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("late", 8.0 - self.current_epoch)

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


def _saved_at_ends() -> dict[str, Any]:
    def save(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(f"{module.monitor}{trainer.current_epoch}.ckpt")

    found = {}
    for monitor in ("falling", "late"):
        module = Plateau(monitor)
        flags: dict[str, Any] = {"max_epochs": 4, "limit_train_batches": 2, "strategy": "shard_ddp"}
        quiet_trainer(callbacks=[LambdaCallback(on_train_epoch_end=save)], **flags).fit(module, loader())
        resumed = Plateau(monitor)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(**flags).fit(resumed, loader(), ckpt_path=f"{monitor}1.ckpt")
        said = [str(each.message) for each in caught if "takes no step" in str(each.message)]
        found[monitor] = module.rates, resumed.rates, said
    return found


def test_a_save_at_an_epochs_end_has_the_values_that_a_schedule_steps_by() -> None:
    """In a callback's own hook, which is ahead of the module's."""
    [found] = run_distributed(_saved_at_ends, 1)
    assert found["falling"] == ([1.0] * 4, [1.0] * 2, [])
    rates, resumed, (said,) = found["late"]
    assert rates == [1.0] * 4
    assert resumed == [1.0] * 2
    assert said.startswith("The schedule that monitors late takes no step for the epoch after which")
