"""Checks and folders ahead of DeepSpeed's start: kernels, low memory, and a run's folders on NVMe."""

import copy
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_shard.engines.zero import kernels
from lightning_shard.engines.zero.config.reading import schedule_class
from lightning_shard.errors import ConfigurationError, PrecisionError, raise_problems
from lightning_shard.precision.policy import PrecisionPolicy, short
from lightning_shard.ranks import Ranks


def prepare_run_config(
    config: Mapping[str, Any], optimizer: Optimizer | None, *, policy: PrecisionPolicy, device: torch.device
) -> tuple[dict[str, Any], list[Path]]:
    """Check kernels, and make this run's folders on NVMe. Returns the configuration with these folders, and the folders
    for `remove_run_folders`. All ranks call it, before the module is touched.

    ConfigurationError, the same on every rank, lists the problems of all ranks. PrecisionError: see `check_low_memory`.
    """
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if optimizer is not None and policy.is_low_memory:
        check_low_memory(optimizer, policy, offload.get("device", "none"))
    ranks, needed = Ranks.of(), kernels.required_kernels(config, optimizer)
    _raise_on_all(ranks, kernels.missing_build_tools(needed, device.type))
    run = ranks.broadcast(uuid.uuid4().hex[:12])
    own, folders, problems = copy.deepcopy(dict(config)), list[Path](), list[str]()
    for name in ("offload_optimizer", "offload_param"):
        section = own["zero_optimization"].get(name) or {}
        if section.get("device") == "nvme":
            # DeepSpeed names files by rank alone, and deletes those that it finds.
            folder = Path(os.path.abspath(section["nvme_path"])) / f"lightning_shard-{run}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or error
                problems.append(f"nvme_path is {str(folder.parent)!r}, but files can't be written there ({reason})")
            folders.append(folder)
            section["nvme_path"] = str(folder)
    folders = list(dict.fromkeys(folders))
    try:
        _raise_on_all(ranks, problems)
    except ConfigurationError:
        remove_run_folders(folders)
        raise
    return own, folders


def make_schedule(section: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """Make the learning rate schedule. Groups get its initial values as torch's schedules write them."""
    notes = {"initial_lr": "lr"} | ({"base_momentum": "betas"} if section["type"] == "OneCycle" else {})
    for group in optimizer.param_groups:
        for name, changed in notes.items():
            group.setdefault(name, group.get(changed))
    return schedule_class(section["type"])(optimizer, **section["params"])


def check_low_memory(optimizer: Optimizer, policy: PrecisionPolicy, device: str) -> None:
    """Refuse an optimizer that DeepSpeed can't step 16-bit masters with, its state on ``device`` (PrecisionError)."""
    if device == "none":
        return
    name = short(policy.master)
    if not any(c.__name__ == "DeepSpeedCPUAdam" for c in type(optimizer).__mro__):
        found = f"configure_optimizers returns {type(optimizer).__name__}"
    elif optimizer.fp32_optimizer_states and (name == "bf16" or device == "nvme"):  # type: ignore[attr-defined]
        # All tensors of a sub-group in files have the masters' dtype: DeepSpeed would round the state silently.
        found = "configure_optimizers returns DeepSpeedCPUAdam with fp32_optimizer_states=True, its default"
    else:
        return
    raise PrecisionError(
        f"masters are {name} and the optimizer is offloaded to {device}. DeepSpeed steps them there by "
        f"DeepSpeedCPUAdam with state in {name} alone, but {found}. Return "
        "deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, fp32_optimizer_states=False), or use an _aligned name or "
        f"precision '{'bf16' if name == 'bf16' else '16'}-mixed', in which any optimizer runs."
    )


def remove_run_folders(folders: list[Path]) -> None:
    """Unlink this rank's files, and the folders once they are empty. Mapped files stay in use."""
    while folders:
        folder = folders.pop()
        with suppress(FileNotFoundError):  # Another rank was faster, and removes all of them.
            for files in folder.glob(f"zero_stage_3/*/rank{Ranks.of().rank}"):
                shutil.rmtree(files, ignore_errors=True)
            for empty in (*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder):
                # Other ranks' files may still be there, or another rank was faster.
                with suppress(OSError):
                    empty.rmdir()


def _raise_on_all(ranks: Ranks, own: list[str]) -> None:
    """Raise the problems of all ranks on each: installed tools may differ between nodes."""
    raise_problems(chain.from_iterable(ranks.gather(own)), "DeepSpeed can't run with these settings")
