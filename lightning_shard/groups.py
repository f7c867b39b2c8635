"""What is made beside the default process group: once for all runs on it, because groups last as long as it does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# Kept with the default group, so that nothing of a process group that was destroyed since is ever used.
_made: tuple[dist.ProcessGroup, dict[Hashable, Any]] | None = None


def beside_default(key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returned when it was first called for ``key`` on the present default group.

    A group that a run makes for itself (of gloo threads and sockets, or an NCCL communicator with its device memory)
    would stay until the process ends: checkpoints and whole tensors are asked for after the run too, and torch destroys
    a group only when it is told to.

    Args:
        key: what it is and what it depends on, the same on all ranks.
        make: makes groups; collective, so that all ranks call this.
    """
    global _made
    default = dist.group.WORLD
    assert default is not None
    if _made is None or _made[0] is not default:
        _made = (default, {})
    known = _made[1]
    if key not in known:
        known[key] = make()
    return known[key]


def forget() -> None:
    """Let go of what was made, ahead of the end of the default group."""
    global _made
    _made = None
