"""Make a fitted module plain again."""

from contextlib import suppress
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from lightning_shard.engines.unsharding import unshard_module
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks

M = TypeVar("M", bound=nn.Module)


def unshard(module: M, *, rank0_only: bool = False, device: torch.device | str = "cpu") -> M:
    """Make a fitted module plain, in place: its own class, full parameters, no hooks of an engine.

    Collective: all ranks call it, after ``fit``. Then ``save_pretrained``, ``torch.save(module.state_dict())``, calls
    outside of the Trainer, copies and other Trainers work as before the fit. Parameters have the values and dtype of
    the master weights. Each process needs memory for all of them. `unshard_after_fit` of a strategy does it by itself.
    Save a checkpoint with optimizer state before it, and make optimizers of the module's new parameters after it.

    Args:
        module: the LightningModule that was fitted, or under FSDP a part of it.
        rank0_only: leave the parameters to rank 0: on other ranks they are on the meta device, without values.
        device: for the parameters and buffers.

    Returns:
        ``module``.

    Raises:
        ConfigurationError: a run of the module goes on, or under ZeRO-3 it is only a part of the fitted one.
    """
    if isinstance(module, LightningModule):
        with suppress(RuntimeError):  # attached to no Trainer
            if module.trainer.state.status == TrainerStatus.RUNNING:
                raise ConfigurationError(
                    "unshard is called in a run, which goes on with the shards: call it after fit, or set "
                    "unshard_after_fit on the strategy. full_parameters gives full values inside of a run."
                )
    unshard_module(module, device=torch.device(device), keep=not rank0_only or Ranks.of().is_first)
    return module
