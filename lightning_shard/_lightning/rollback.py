"""What of Lightning's own state goes back with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer


def restore_steps(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Restore schedulers, the precision plugin and the count of optimizer steps; the loops' place in the data stays.

    ``checkpoint``: the dictionary that Lightning dumped in the same fit, or the one that it goes on from.
    """
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    plugin = trainer.precision_plugin
    if (state := checkpoint.get(type(plugin).__qualname__)) is not None:
        plugin.load_state_dict(state)
    loop, loops = trainer.fit_loop.epoch_loop, checkpoint["loops"]["fit_loop"]
    loop.automatic_optimization.optim_progress.load_state_dict(
        loops["epoch_loop.automatic_optimization.optim_progress"]
    )
    loop.manual_optimization.optim_step_progress.load_state_dict(
        loops["epoch_loop.manual_optimization.optim_step_progress"]
    )
    loop.on_load_checkpoint(loops["epoch_loop.state_dict"])
