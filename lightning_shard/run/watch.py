"""A run whose ranks watch each other: what one of them fails of is said by all, and ends all."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_shard.cluster import prefix
from lightning_shard.cluster.preemption import Preempted
from lightning_shard.cluster.preflight import Place
from lightning_shard.cluster.watch import Watch


class RunWatch:
    """The watch of one run after the other."""

    def __init__(self, lost_rank_seconds: float | None) -> None:
        """``lost_rank_seconds``: how long a rank may give no sign of life; None: nobody watches."""
        self._lost_rank_seconds = lost_rank_seconds
        self._watch: Watch | None = None
        self._unmark: Callable[[], None] = _nothing
        self._rank = 0

    def mark_messages(self, rank: int, size: int) -> None:
        """Have this process' log lines and warnings say which rank they are of, until the run ends."""
        self._unmark()
        self._rank = rank
        self._unmark = prefix.install(prefix.rank_prefix(rank, size, socket.gethostname()))

    def start(self, met: tuple[Place, int] | None, folder: Path | None) -> None:
        """Watch the other ranks until the run ends. All ranks call it.

        Args:
            met: where the ranks met, and the number of the run on their process group; None: they did so elsewhere.
            folder: where a rank that is stuck writes its traces; None: nowhere.
        """
        self._watch = None
        if self._lost_rank_seconds is not None and met is not None:
            place, run = met
            self._watch = Watch(place, self._lost_rank_seconds, run=run, folder=folder)
            self._watch.start()

    def failed(self, exception: BaseException) -> None:
        """Tell the other ranks, or say which rank's failure this is the outcome of."""
        watch = self._watch
        if watch is None or isinstance(exception, Preempted):
            return
        self._watch = None
        cause = watch.failed(exception)
        if cause is not None and not cause.endswith(f"{type(exception).__name__}: {exception}"):
            print(f"[rank {self._rank}] the cause: {cause}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End with the run."""
        self._unmark()
        self._unmark = _nothing
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()


def _nothing() -> None:
    """Messages are not marked."""
