"""A run whose ranks watch each other: what one of them fails of is said by all, and ends all."""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning.pytorch import Trainer

from lightning_shard._lightning import Replacements, loops
from lightning_shard.cluster import traces
from lightning_shard.cluster.preemption import Preempted
from lightning_shard.cluster.preflight import Place
from lightning_shard.cluster.standstill import Progress
from lightning_shard.cluster.watch import Watch


class RunWatch:
    """The watch of one run after the other."""

    def __init__(
        self,
        lost_rank_seconds: float | None,
        stuck_seconds: float | None = None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Nobody watches yet; see `Watch` for the seconds, of which None means that nobody does."""
        self._lost_rank_seconds, self._stuck_seconds = lost_rank_seconds, stuck_seconds
        self._exit_process = exit_process
        self._watch: Watch | None = None
        self._failed: Watch | None = None  # has its last words to say
        self._unmark: Callable[[], None] = lambda: None

    def mark_messages(self, rank: int, size: int) -> None:
        """Have this process' log lines and warnings say which rank they are of, until the run ends."""
        self._unmark()
        self._unmark = install_prefix(rank_prefix(rank, size, socket.gethostname()))

    def record_into(self, folder: Path | None) -> None:
        """Have torch's own record of collectives in ``folder`` too; ahead of the process group."""
        if folder is not None and self._lost_rank_seconds is not None:
            traces.record_into(folder.absolute(), os.environ)

    def start(
        self,
        met: tuple[Place, int] | None,
        folder: Path | None,
        replacements: Replacements | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        """Watch the other ranks until the run ends. All ranks call it.

        ``met``: where the ranks met, and the number of the run on their process group; None: they did so elsewhere. A
        rank that is stuck writes its traces into ``folder``. With ``trainer`` it is watched whether its main thread
        gets on.
        """
        if self._failed is not None:
            self._failed.close()
        self._watch = self._failed = None
        progress = None
        if trainer is not None and replacements is not None:
            progress = Progress(lambda: trainer.global_step)
            loops.follow_actions(replacements, trainer, (progress.begin, progress.end))
        if self._lost_rank_seconds is None or met is None:
            return
        place, run = met
        self._watch = Watch(
            place,
            self._lost_rank_seconds,
            run=run,
            folder=folder,
            progress=progress,
            stuck_seconds=self._stuck_seconds,
            exit_process=self._exit_process,
        )
        self._watch.start()

    def failed(self, exception: BaseException) -> None:
        """Tell the other ranks, or say in one line which rank's failure this is the outcome of."""
        watch = self._watch
        if watch is None or isinstance(exception, Preempted):
            return
        self._watch, self._failed = None, watch
        if watch.failed(exception) is not None:
            _say_nothing_of(exception)

    def end(self) -> None:
        self._unmark()
        self._unmark = lambda: None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()


def _say_nothing_of(outcome: BaseException) -> None:
    """Print no traceback where ``outcome`` ends this process: its cause is on another rank, and was said in a line."""
    print_traceback = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link: BaseException | None = error
        while link is not None and link is not outcome:
            link = link.__cause__ or link.__context__
        if link is None:
            print_traceback(kind, error, trace)

    sys.excepthook = hook


def rank_prefix(rank: int, world_size: int, node: str) -> str:
    """What stands before the lines of ``rank``: nothing on rank 0, whose lines are those of the run."""
    return f"[rank {rank} on {node}] " if world_size > 1 and rank > 0 else ""


def install_prefix(prefix: str) -> Callable[[], None]:
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
