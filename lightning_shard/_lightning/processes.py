"""Processes under Lightning: how they are launched, connected and reduced over, and what Lightning is told of them."""

# Some of the imports are for others.
# ruff: noqa: F401

from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection as destroy_at_exit
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as sync_reduce
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection as DDPForwardRedirection
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.device_mesh import DeviceMesh


def set_device(module: LightningModule, device: torch.device) -> None:
    """Make ``device`` what ``LightningModule.device`` gives; the tensors are moved by the engines."""
    _update_properties(module, device=device)


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Make ``mesh`` what ``LightningModule.device_mesh`` gives in ``configure_model``."""
    module._device_mesh = mesh


def set_rank(rank: int) -> None:
    """Tell Lightning's ``rank_zero_*`` helpers which rank this process is."""
    for only in (rank_zero_only, fabric_rank_zero_only):
        vars(only)["rank"] = rank


def layer_sync(strategy: ParallelStrategy) -> Any:
    return strategy._layer_sync


def let_children_end(strategy: ParallelStrategy) -> None:
    """Keep Lightning's launcher from killing this process when the processes that it started end with an exit code."""
    processes = getattr(strategy.launcher, "procs", None)
    if isinstance(processes, list):
        processes.clear()
