"""Checks and folders ahead of DeepSpeed's start: parameters of its sections, kernels, and a run's folders on NVMe."""

import copy
import inspect
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_shard.engines.zero import kernels
from lightning_shard.engines.zero.config.reading import find_class
from lightning_shard.errors import ConfigurationError, PrecisionError, raise_problems
from lightning_shard.precision.policy import PrecisionPolicy, short
from lightning_shard.ranks import Ranks, warn_on_first_rank


def prepare_run_config(
    config: Mapping[str, Any], optimizer: Optimizer | None, *, policy: PrecisionPolicy, device: torch.device
) -> tuple[dict[str, Any], list[Path]]:
    """Check sections and kernels, and make this run's folders on NVMe. Returns the configuration with these folders,
    and the folders for `remove_run_folders`. All ranks call it, before the module is touched.

    ConfigurationError, the same on every rank, lists the problems of all ranks. PrecisionError: see `check_low_memory`.
    """
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if optimizer is not None and policy.is_low_memory:
        check_low_memory(optimizer, policy, offload.get("device", "none"))
    ranks = Ranks.of()
    # The sections are the same on every rank, but a package may be missing on some.
    _raise_on_all(ranks, section_problems(config, optimizer))
    needed = kernels.required_kernels(config, optimizer)
    stale = [kernels.stale_lock_problem(name, wait=True) for name in needed]
    _raise_on_all(ranks, [*kernels.missing_build_tools(needed, device.type), *filter(None, stale)])
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


_READ_BY_ENGINE = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of an Adam that DeepSpeed's engine reads itself, and does not pass to the constructor."""


def section_problems(config: Mapping[str, Any], optimizer: Optimizer | None) -> list[str]:
    """List the values that DeepSpeed would refuse, in stage 3 after it has sharded parameters: of ``config``, of the
    section ``scheduler``, and without ``optimizer`` of that section.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    found, groups = [], [] if optimizer is None else optimizer.param_groups
    try:
        DeepSpeedConfig(dict(config))
    except (AssertionError, ValueError, DeepSpeedConfigError) as error:
        found.append(f"DeepSpeed refuses the configuration: {error}")
    for name in ("optimizer", "scheduler"):
        section = config.get(name)
        if section is None or (name == "optimizer" and optimizer is not None):
            continue
        kind, params = section["type"], section["params"]
        try:
            made = kernels.optimizer_class(config) if name == "optimizer" else find_class(name, kind)
        except ImportError as error:
            found.append(f"{name}.type is {kind!r}, which needs the package mup: pip install mup ({error})")
            continue
        taken_out = _READ_BY_ENGINE if name == "optimizer" and kind.lower() in ("adam", "adamw") else ()
        # Muon's names were compared when the section was read.
        given = {} if kind.lower() == "muon" else {k: v for k, v in params.items() if k not in taken_out}
        signature = inspect.signature(made)
        try:
            if name == "optimizer":
                # Not called: the constructor may compile a kernel.
                signature.bind(None, **given)
                usual = {key: each.default for key, each in signature.parameters.items()}
                groups = [usual | given]
            else:
                stand_in = _StandIn(groups)
                schedule = made(stand_in, **given)
                stand_in.step()
                schedule.step()
        except (TypeError, ValueError, AssertionError, ArithmeticError, RuntimeError) as error:
            takes = ", ".join([*list(signature.parameters)[1:], *taken_out])
            found.append(
                f"{name}.params of {kind} is {params!r}, but {made.__name__} takes {takes}: "
                f"{error or type(error).__name__}. Correct it, or leave it to configure_optimizers"
            )
    return found


def make_schedule(section: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """Make the learning rate schedule. Its initial values go into the groups as torch's schedules write them, so that a
    resume can tell which were changed.
    """
    notes = {"initial_lr": "lr"} | ({"base_momentum": "betas"} if section["type"] == "OneCycle" else {})
    for group in optimizer.param_groups:
        for name, changed in notes.items():
            group.setdefault(name, group.get(changed))
    return find_class("scheduler", section["type"])(optimizer, **section["params"])


class _StandIn(Optimizer):
    """Has the hyperparameters of other groups, to try a schedule on."""

    def __init__(self, groups: Iterable[Mapping[str, Any]]) -> None:
        own: list[dict[str, Any]] = [{**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in groups]
        super().__init__(own, {key: value for key, value in own[0].items() if key != "params"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def warn_of_stale_lock() -> None:
    """Warn that a DeepSpeedCPUAdam would wait for a stale lock. Nobody knows yet whether one will be made."""
    if message := kernels.stale_lock_problem("cpu_adam", wait=False):
        warn_on_first_rank(f"If configure_optimizers makes a DeepSpeedCPUAdam, it will not return: {message}.")


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
    """Unlink this rank's files after the engine let them go, and the folders once they are empty. Mapped files stay in
    use.
    """
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
