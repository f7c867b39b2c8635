"""A run whose ranks watch each other: what one of them fails of is said by all, and ends all."""

from __future__ import annotations

import atexit
import socket
import sys
from collections.abc import Callable

from torch.distributed import ProcessGroup, destroy_process_group, group

from lightning_shard import _lightning
from lightning_shard.cluster import prefix
from lightning_shard.cluster.preemption import Preempted
from lightning_shard.cluster.preflight import Place
from lightning_shard.cluster.watch import Watch
from lightning_shard.ranks import forget_made_groups
from lightning_shard.strategies.preempting import PreemptibleStrategy

# The process group of this process, where its ranks met, and how many runs there were on it.
_met: tuple[ProcessGroup, Place, int] | None = None


def remember_place(place: Place) -> None:
    """Keep where the ranks of the process group met, for later Trainers in the same processes."""
    global _met
    assert group.WORLD is not None
    _met = (group.WORLD, place, 0)
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the process group that this package made, while there is an interpreter.

    A thread of the backend that lets go of a tensor once the interpreter has begun to end aborts the process. After an
    exception the group is left alone: to destroy it would wait for collectives that no other rank joins any more.
    """
    global _met
    made, _met = _met, None
    if made is not None and made[0] is group.WORLD and not hasattr(sys, "last_value"):
        forget_made_groups()
        destroy_process_group()


class WatchedStrategy(PreemptibleStrategy):
    """Starts and ends the watch of a run; a subclass says when its processes are connected."""

    lost_rank_seconds: float | None
    _watch: Watch | None = None
    _unmark_messages: Callable[[], None] = staticmethod(lambda: None)

    def _start_watch(self) -> None:
        """Watch the other ranks until the run ends, if this package made the process group. All ranks call it."""
        global _met
        self._watch = None
        if self.lost_rank_seconds is None or _met is None or _met[0] is not group.WORLD:
            return
        _met = (_met[0], _met[1], _met[2] + 1)
        self._watch = Watch(_met[1], self.lost_rank_seconds, run=_met[2], folder=self._failure_folder())
        self._watch.start()

    def _take_over_end(self) -> None:
        """Have Lightning call `_at_end` in place of restoring its signal handlers."""
        _lightning.at_end_of_run(self._replacements, self._trainer, self._at_end)

    def _mark_messages(self) -> None:
        """Have this process' log lines and warnings say which rank they are of, until the run ends."""
        self._unmark_messages()
        self._unmark_messages = prefix.install(
            prefix.rank_prefix(self.global_rank, self.world_size, socket.gethostname())
        )

    def _at_end(self) -> None:
        self._unmark_messages()
        self._give_signals_back()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or say which rank's failure this is the outcome of."""
        # They end once they are told, and would take the save in the background with them.
        self._end_saving()
        watch = self._watch
        if watch is not None and not isinstance(exception, Preempted):
            self._watch = None
            cause = watch.failed(exception)
            if cause is not None and not cause.endswith(f"{type(exception).__name__}: {exception}"):
                print(f"[rank {self.global_rank}] the cause: {cause}", file=sys.stderr, flush=True)
        super().on_exception(exception)
