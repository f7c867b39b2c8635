"""Log lines and warnings that say which rank, on which node, they come from."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any


def rank_prefix(rank: int, world_size: int, node: str) -> str:
    """What stands before the lines of ``rank``: nothing on rank 0, whose lines are those of the run."""
    return f"[rank {rank} on {node}] " if world_size > 1 and rank > 0 else ""


def install(prefix: str) -> Callable[[], None]:
    """Put ``prefix`` before this process' log messages and warnings; the result undoes it.

    Print statements are the user's own; ``srun --label`` and ``torchrun --tee 3`` mark those.
    """
    if not prefix:
        return lambda: None
    make, show = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        made.msg = prefix + str(made.msg)
        return made

    def text(*args: Any, **kwargs: Any) -> str:
        return prefix + show(*args, **kwargs)

    logging.setLogRecordFactory(record)
    warnings.formatwarning = text

    def undo() -> None:
        # Whoever wrapped them later goes on.
        if logging.getLogRecordFactory() is record:
            logging.setLogRecordFactory(make)
        if warnings.formatwarning is text:
            warnings.formatwarning = show

    return undo
