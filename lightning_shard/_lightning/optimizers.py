"""Optimizers and schedulers as Lightning wraps and steps them."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_shard._lightning import Replacements
from lightning_shard.ranks import Ranks


def is_missing_optimizer(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is Lightning's placeholder for a ``configure_optimizers`` that returned None."""
    return type(optimizer).__module__ == LightningOptimizer.__module__


def update_wrappers(wrappers: list[LightningOptimizer]) -> None:
    """Give users' wrappers of optimizers the methods that an engine has set on the optimizers. A wrapper of one of
    DeepSpeed's on the host has no valid ``opt_id``: with it, dropping the wrapper would free the optimizer's compiled
    state (``DeepSpeedCPUAdam.__del__``).
    """
    for wrapper in wrappers:
        own = vars(wrapper.optimizer)
        vars(wrapper).update({name: own[name] for name in ("zero_grad", "add_param_group") if name in own})
        if any(name.startswith("ds_opt_") for name in own):
            vars(wrapper)["opt_id"] = -1


def step_scheduler(scheduler: Any) -> LRSchedulerConfig:
    return LRSchedulerConfig(scheduler=scheduler, interval="step")


def hold_schedulers(replacements: Replacements, trainer: Trainer, when: Callable[[], bool]) -> None:
    """Don't step schedulers of interval ``step`` while ``when()`` is true, since Lightning steps them after skipped
    steps too. Schedulers that monitor a value get rank 0's, so that all shards of a parameter have one learning rate.
    """

    def step_by_rank_0(step: Callable[..., None], scheduler: Any, metric: Any) -> None:
        if when() and scheduler in [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]:
            return
        values = [None] if metric is None else Ranks.of().gather(float(metric))
        if any(value != values[0] == values[0] for value in values):
            if scheduler not in told:
                told.append(scheduler)
                name = next(c.monitor for c in trainer.lr_scheduler_configs if c.scheduler is scheduler)
                rank_zero_warn(
                    f"The schedule that monitors {name} follows rank 0's, {values[0]:g}, as ranks have values of their "
                    "own: log it with sync_dist=True for their mean."
                )
            metric = torch.tensor(values[0], dtype=torch.float64)
        step(scheduler, metric)

    told = list[Any]()
    replacements.wrap(trainer.lightning_module, "lr_scheduler_step", step_by_rank_0)
