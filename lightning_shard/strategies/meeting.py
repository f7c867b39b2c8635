"""The processes of a run before their process group: who started them, where they meet, whether they are alike."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import Store

from lightning_shard.checkpoint.manifest import library_versions
from lightning_shard.cluster.launch import Launch, check_launch, meeting_point
from lightning_shard.cluster.preflight import Facts, Place, compare, connect
from lightning_shard.cluster.slurm import read_job

# Of the Trainer; the strategy's own are all compared.
_TRAINER_SETTINGS = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "val_check_interval")
_PLAIN = (str, int, float, bool, type(None), timedelta, tuple)


def launch_of(environment: ClusterEnvironment, *, nodes: int, devices: int, gpu: bool) -> Launch:
    """What the Trainer counts on."""
    kinds = ((SLURMEnvironment, "slurm"), (TorchElasticEnvironment, "torchrun"), (LightningEnvironment, "lightning"))
    launcher = next((name for kind, name in kinds if isinstance(environment, kind)), type(environment).__name__)
    return Launch(nodes=nodes, devices=devices, launcher=launcher, gpu=gpu)


def check(launch: Launch, environ: Mapping[str, str]) -> None:
    """See `check_launch`."""
    check_launch(read_job(environ), launch, environ)


def meet(
    strategy: Any, environment: ClusterEnvironment, launch: Launch, environ: MutableMapping[str, str], *, seconds: float
) -> tuple[Store, Place]:
    """Connect and compare all ranks; the store that the process group is to be made over, and where it is.

    All ranks call it.

    Raises:
        ConfigurationError: see `connect` and `compare`.
    """
    environ.update(meeting_point(read_job(environ), launch, environ))
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launch.launcher == "torchrun"
    place = Place(
        address=environment.main_address,
        port=environment.main_port,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        agent=environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else None,
    )
    store = connect(place, seconds)
    trainer: Trainer = strategy.lightning_module.trainer
    root = str(trainer.default_root_dir)
    writes = trainer.state.fn == TrainerFn.FITTING and launch.nodes > 1 and not re.match(r"\w+://", root)
    facts = Facts(node=socket.gethostname(), versions=library_versions(), settings=settings_of(strategy, trainer))
    for warning in compare(store, place, facts, seconds, Path(root) if writes else None):
        rank_zero_warn(warning)
    return store, place


def settings_of(strategy: Any, trainer: Trainer) -> dict[str, str]:
    """Names and values of what must not differ between ranks."""
    found = {"strategy": type(strategy).__name__, "precision": str(strategy.precision_plugin.precision)}
    for name, value in vars(strategy).items():
        if not name.startswith("_") and (isinstance(value, _PLAIN) or dataclasses.is_dataclass(value)):
            found[f"strategy.{name}"] = repr(value)
    for name in _TRAINER_SETTINGS:
        found[f"trainer.{name}"] = repr(getattr(trainer, name, None))
    found["trainer.default_root_dir"] = os.path.abspath(str(trainer.default_root_dir))
    module = trainer.lightning_module
    found["model"] = type(module).__qualname__
    for name, value in dict(getattr(module, "hparams", {})).items():
        if isinstance(value, _PLAIN):
            found[f"model.{name}"] = repr(value)
    return found
