"""Optimizers and schedulers as Lightning wraps and steps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_shard._lightning.replaced import Replacements


def is_missing_optimizer(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` stands for none, which Lightning puts where ``configure_optimizers`` returned None."""
    return isinstance(optimizer, _MockOptimizer)


def wrapped(optimizers: list[Optimizer], strategy: Strategy) -> list[LightningOptimizer]:
    """The optimizers as users see them, with what was replaced on the instances.

    A wrapper is of a class derived from the optimizer's, and finds its attributes. Of DeepSpeed's optimizers on the
    host it would free the compiled state, by its number, when it is dropped (``DeepSpeedCPUAdam.__del__``): it gets
    no number.
    """
    wrappers = [LightningOptimizer._to_lightning_optimizer(optimizer, strategy) for optimizer in optimizers]
    for wrapper in wrappers:
        if "zero_grad" in vars(wrapper.optimizer):
            vars(wrapper)["zero_grad"] = wrapper.optimizer.zero_grad
        if any(name.startswith("ds_opt_") for name in vars(wrapper.optimizer)):
            vars(wrapper)["opt_id"] = -1
    return wrappers


def step_scheduler(scheduler: Any) -> LRSchedulerConfig:
    """A scheduler as Lightning steps it: after every optimizer step."""
    return LRSchedulerConfig(scheduler=scheduler, interval="step")


def hold_schedulers(replacements: Replacements, trainer: Trainer, when: Callable[[], bool]) -> None:
    """Leave schedulers of interval ``step`` where they are after a batch for which ``when`` says so.

    Lightning advances them after every batch that had an optimizer step, one that its own AMP skipped too.
    """
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def update_unless_held(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not when():
            update(interval, update_plateau_schedulers)

    replacements.replace(loop, "update_lr_schedulers", update_unless_held)
