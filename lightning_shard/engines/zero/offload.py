"""Before DeepSpeed starts: its sections' parameters, its kernels, and the folder in which a run offloads to NVMe."""

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
from lightning_shard.engines.zero.config.reading import class_of
from lightning_shard.errors import ConfigurationError, PrecisionError, raise_problems
from lightning_shard.precision.policy import PrecisionPolicy, short
from lightning_shard.ranks import Ranks, warn_on_first_rank


def prepare(
    config: Mapping[str, Any], optimizer: Optimizer | None, *, policy: PrecisionPolicy, device: torch.device
) -> tuple[dict[str, Any], list[Path]]:
    """Check that the sections' parameters fit and that the kernels that DeepSpeed will build can be built, and make
    this run's folders for NVMe, which are in the returned configuration, and returned for `clean_up`. All ranks call
    it, before the module is touched. The same ConfigurationError on every rank has all that is wrong on any;
    PrecisionError as `check_low_memory`.
    """
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if optimizer is not None and policy.is_low_memory:
        check_low_memory(optimizer, policy, offload.get("device", "none"))
    ranks = Ranks.of()
    # The sections are the same on every rank; whether a package is there may differ.
    _raise_on_all(ranks, misfits(config, optimizer))
    needed = kernels.required_kernels(config, optimizer)
    stale = [kernels.stale_lock(name, wait=True) for name in needed]
    _raise_on_all(ranks, [*kernels.lacking(needed, device.type), *filter(None, stale)])
    config, folders = in_run_folder(config, ranks.broadcast(uuid.uuid4().hex[:12]))
    found = [_problem_with(path) for path in folders]
    try:
        _raise_on_all(ranks, [problem for problem in found if problem is not None])
    except ConfigurationError:
        clean_up(folders)
        raise
    return config, folders


_TAKEN_OUT = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""What DeepSpeed's engine itself reads of the parameters of an Adam."""


def misfits(config: Mapping[str, Any], optimizer: Optimizer | None) -> list[str]:
    """What DeepSpeed would not take, in stage 3 once parameters are sharded: of ``config``, and of the parameters of
    the sections ``optimizer``, if the user has none, and ``scheduler``.
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
            made = kernels.optimizer_class(config) if name == "optimizer" else class_of(name, kind)
        except ImportError as error:
            found.append(f"{name}.type is {kind!r}, which needs the package mup: pip install mup ({error})")
            continue
        is_adam = name == "optimizer" and kind.lower() in ("adam", "adamw")
        # What Muon takes was compared when the section was read.
        given = {} if kind.lower() == "muon" else {k: v for k, v in params.items() if not (is_adam and k in _TAKEN_OUT)}
        signature = inspect.signature(made)
        try:
            if name == "optimizer":
                # Its constructor may compile a kernel.
                signature.bind(None, **given)
                usual = {key: each.default for key, each in signature.parameters.items()}
                groups = [usual | given]
            else:
                stand_in = _StandIn(groups)
                schedule = made(stand_in, **given)
                stand_in.step()
                schedule.step()
        except (TypeError, ValueError, AssertionError, ArithmeticError, RuntimeError) as error:
            takes = ", ".join([*list(signature.parameters)[1:], *(_TAKEN_OUT if is_adam else ())])
            found.append(
                f"{name}.params of {kind} is {params!r}, but {made.__name__} takes {takes}: "
                f"{error or type(error).__name__}. Correct it, or leave it to configure_optimizers"
            )
    return found


def schedule_of(section: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The schedule; what it begins with is noted where torch's note it, for a resume to tell what it has changed."""
    notes = {"initial_lr": "lr"} | ({"base_momentum": "betas"} if section["type"] == "OneCycle" else {})
    for group in optimizer.param_groups:
        for name, changed in notes.items():
            group.setdefault(name, group.get(changed))
    return class_of("scheduler", section["type"])(optimizer, **section["params"])


class _StandIn(Optimizer):
    """Has the hyperparameters of other groups, for a schedule to try."""

    def __init__(self, groups: Iterable[Mapping[str, Any]]) -> None:
        own: list[dict[str, Any]] = [{**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in groups]
        super().__init__(own, {key: value for key, value in own[0].items() if key != "params"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def in_run_folder(config: Mapping[str, Any], run: str) -> tuple[dict[str, Any], list[Path]]:
    """The configuration with a folder of this ``run`` (the same on all ranks) under each ``nvme_path``, and these
    folders: DeepSpeed names files by rank alone and deletes what it finds.
    """
    moved = copy.deepcopy(dict(config))
    folders = []
    for name in ("offload_optimizer", "offload_param"):
        section = moved["zero_optimization"].get(name) or {}
        if section.get("device") == "nvme":
            folders.append(Path(os.path.abspath(section["nvme_path"])) / f"lightning_shard-{run}")
            section["nvme_path"] = str(folders[-1])
    return moved, list(dict.fromkeys(folders))


def _problem_with(folder: Path) -> str | None:
    """Make ``folder``; why it can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"nvme_path is {str(folder.parent)!r}, but files can't be written there ({error.strerror or error})"
    return None


def warn_of_lock() -> None:
    """Tell of a stale lock that an optimizer's constructor would wait for; whether it needs that kernel is unknown."""
    if message := kernels.stale_lock("cpu_adam", wait=False):
        warn_on_first_rank(f"If configure_optimizers makes a DeepSpeedCPUAdam, it will not return: {message}.")


def check_low_memory(optimizer: Optimizer, policy: PrecisionPolicy, device: str) -> None:
    """Refuse an optimizer that DeepSpeed can't step 16-bit masters with, its state on ``device`` (PrecisionError)."""
    if device == "none":
        return
    name = short(policy.master)
    if not any(c.__name__ == "DeepSpeedCPUAdam" for c in type(optimizer).__mro__):
        found = f"configure_optimizers returns {type(optimizer).__name__}"
    elif optimizer.fp32_optimizer_states and (name == "bf16" or device == "nvme"):  # type: ignore[attr-defined]
        # In files everything of a sub-group has the masters' dtype: DeepSpeed would round the state without a word.
        found = "configure_optimizers returns DeepSpeedCPUAdam with fp32_optimizer_states=True, its default"
    else:
        return
    raise PrecisionError(
        f"masters are {name} and the optimizer is offloaded to {device}, where DeepSpeed steps them with "
        f"DeepSpeedCPUAdam and state in {name} alone, but {found}. Return "
        "deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, fp32_optimizer_states=False), or use an _aligned name or "
        f"precision '{'bf16' if name == 'bf16' else '16'}-mixed', where any optimizer runs."
    )


def clean_up(folders: list[Path]) -> None:
    """Unlink this rank's files, which the engine let go (mapped ones stay in use), and the folders with the last's."""
    while folders:
        folder = folders.pop()
        with suppress(FileNotFoundError):  # another rank was faster, and removes all of them
            for files in folder.glob(f"zero_stage_3/*/rank{Ranks.of().rank}"):
                shutil.rmtree(files, ignore_errors=True)
            for empty in (*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder):
                # Other ranks' files are there still, or another rank was faster.
                with suppress(OSError):
                    empty.rmdir()


def _raise_on_all(ranks: Ranks, own: list[str]) -> None:
    # What is installed may differ between nodes.
    raise_problems(chain.from_iterable(ranks.gather(own)), "DeepSpeed can't run with these settings")
