"""What a strategy does around DeepSpeed's offload: kernels and folders before a run, files after it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_shard.engines.zero import folder, kernels
from lightning_shard.errors import ConfigurationError
from lightning_shard.resume import gather_states

if TYPE_CHECKING:
    from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy


def prepare(
    strategy: ShardDeepSpeedStrategy, config: Mapping[str, Any], optimizer: Optimizer | None
) -> tuple[dict[str, Any], list[Path]]:
    """Check that the kernels which DeepSpeed will build can be built, and make this run's folders for NVMe.

    All ranks call it, before the module is touched.

    Returns:
        The configuration with this run's folders in it, and the folders, which `clean_up` removes.

    Raises:
        ConfigurationError: on every rank alike, with all that is wrong on any.
    """
    needed = kernels.required_kernels(config, optimizer)
    device = strategy.root_device.type
    _raise_alike([*kernels.lacking(needed, device), *_locks(needed)])
    config, folders = folder.in_run_folder(config, strategy.broadcast(uuid.uuid4().hex[:12]))
    found = [folder.problem_with(path, rank=strategy.global_rank) for path in folders]
    try:
        _raise_alike([problem for problem in found if problem is not None])
    except ConfigurationError:
        clean_up(strategy, folders)
        raise
    return config, folders


def clean_up(strategy: ShardDeepSpeedStrategy, folders: list[Path]) -> None:
    """Remove this rank's files, after the engine has let go of them."""
    while folders:
        folder.remove(folders.pop(), rank=strategy.global_rank)


def _locks(needed: tuple[str, ...]) -> list[str]:
    """Wait for builds that are going on; the locks of those that were killed."""
    problems: list[str] = []
    waiting = {path for name in needed if (path := kernels.lock(name)) is not None}
    while any(gather_states(bool(waiting))):
        for path in sorted(waiting):
            state = kernels.state_of_lock(path)
            if state is kernels.LockState.STALE:
                problems.append(kernels.stale_message(path))
            if state is not kernels.LockState.IN_USE:
                waiting.remove(path)
        if waiting:
            kernels.pause()
    return problems


def _raise_alike(own: list[str]) -> None:
    # What is installed may differ between nodes.
    problems = list(dict.fromkeys(problem for rank in gather_states(own) for problem in rank))
    if len(problems) == 1:
        raise ConfigurationError(f"DeepSpeed can't run with these settings: {problems[0]}.")
    if problems:
        raise ConfigurationError(
            "DeepSpeed can't run with these settings:" + "".join(f"\n  - {problem}." for problem in problems)
        )
