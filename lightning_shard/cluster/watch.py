"""A rank that fails brings the others down with its own words, instead of leaving them in a collective.

Every rank has a thread that says over the store of the process group that it lives, and looks whether another has
failed. A rank that raises says why; a rank that was killed falls silent. The others print the cause and their stacks,
and end, wherever their main threads are.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from lightning_shard.cluster import traces
from lightning_shard.cluster.preflight import Place

INTERVAL_SECONDS = 1.0
"""Between two signs of life; longer with more than 200 ranks, which all speak to one process."""

GRACE_SECONDS = 15.0
"""More than a backend takes to tell the main thread that a connection is lost."""

_STORE_SECONDS = 10.0  # how long a call of the store waits for an answer

_FAREWELL_SECONDS = 5.0  # how long rank 0, which keeps the store, waits for the others to have read


class Watch:
    """The thread of one rank, from `start` to `end`."""

    def __init__(
        self,
        place: Place,
        lost_seconds: float,
        *,
        run: int = 0,
        folder: Path | None = None,
        grace_seconds: float = GRACE_SECONDS,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Connect to the store of the process group, over a connection of the thread's own.

        Args:
            place: where the store is, and which rank this is.
            lost_seconds: how long a rank may be silent before the others take it for lost.
            run: number of the run on this process group.
            folder: where a rank that is stuck writes its last collectives and its stacks; None: nowhere.
            grace_seconds: how long the main thread may take to end by itself once the cause is known.
            exit_process: what ends this process.
        """
        store = TCPStore(
            place.address,
            place.port,
            None,
            is_master=False,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
        )
        self._store = PrefixStore(f"watch/{place.agent or 0}/{run}", store)
        self._rank, self._size = place.rank, place.world_size
        self._lost_seconds = lost_seconds
        self._interval = INTERVAL_SECONDS * max(1.0, place.world_size / 200)
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._exit = exit_process
        self._ending = threading.Event()
        self._lock = threading.Lock()  # of the connection, which the main thread uses too
        self._beats: dict[int, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._run, name="lightning_shard-watch", daemon=True)
        self._store.set(f"node/{self._rank}", socket.gethostname())

    def start(self) -> None:
        """Begin to watch and to be watched."""
        self._thread.start()
        # For a process that ends without `end` or `failed`.
        atexit.register(self._stop)

    def end(self) -> None:
        """The run has ended well on this rank; rank 0, which keeps the store, waits a moment for the others."""
        self._ending.set()
        try:
            with self._lock:
                self._store.set(f"ended/{self._rank}", "")
            if self._rank == 0:
                self._until(lambda: self._store.check([f"ended/{rank}" for rank in range(self._size)]))
        except RuntimeError:
            pass  # the store is gone, and with it whoever would care
        self._stop()

    def failed(self, error: BaseException) -> str | None:
        """This rank raises ``error``: tell the others, unless it is the outcome of another's failure.

        Returns what another rank has failed of, which is the cause of this error, or None.
        """
        self._ending.set()
        if _is_lost_connection(error):
            # The collective that failed, or did not end in time, is the last one of each rank's record.
            self._write_traces()
        try:
            with self._lock:
                own = failure = f"{self._name(self._rank)} failed: {type(error).__name__}: {error}"
                if _is_lost_connection(error) and (lost := self._silent_ranks()):
                    own = self._lost_message(lost)
                cause = self._store.compare_set("failed", "", own).decode()
                self._store.set(f"told/{self._rank}", "")
            if self._rank == 0:
                # With this process the store ends.
                self._until(lambda: self._store.check([f"told/{rank}" for rank in range(self._size)]))
        except RuntimeError:
            return f"rank 0 was lost: the store that it keeps is gone ({type(error).__name__}: {error})"
        finally:
            self._stop()
        return None if cause == failure else cause

    def _stop(self) -> None:
        """Let the thread end: one that comes back from the store while the interpreter ends aborts the process."""
        atexit.unregister(self._stop)
        self._ending.set()
        if self._thread.is_alive():
            # A call of the store may take that long.
            self._thread.join(2 * _STORE_SECONDS)

    def _run(self) -> None:
        while not self._ending.wait(self._interval):
            try:
                cause = self._look()
            except RuntimeError:
                cause = "rank 0 was lost: the store that it keeps does not answer. It was killed, or its node is gone."
            if cause and not self._ending.is_set():
                self._bring_down(cause)
                return

    def _look(self) -> str | None:
        """Give a sign of life, and see whether all is well; the cause if not."""
        with self._lock:
            self._store.add(f"beat/{self._rank}", 1)
            if self._store.check(["failed"]):
                self._store.set(f"told/{self._rank}", "")
                return self._store.get("failed").decode()
            if self._rank != 0:
                return None
            lost = self._overdue(self._lost_seconds)
            if not lost:
                return None
            return self._store.compare_set("failed", "", self._lost_message(lost)).decode()

    def _overdue(self, seconds: float) -> list[int]:
        """Ranks that gave no sign of life for this long, by the clock of this process."""
        now = time.monotonic()
        overdue = []
        for rank in range(self._size):
            beat = int(self._store.add(f"beat/{rank}", 0))
            if self._beats.get(rank, (-1, 0.0))[0] != beat:
                self._beats[rank] = (beat, now)
            elif now - self._beats[rank][1] > seconds and not self._store.check([f"ended/{rank}"]):
                overdue.append(rank)
        return overdue

    def _silent_ranks(self) -> list[int]:
        """Ranks that give no sign of life within a few intervals; asked when a connection was lost."""
        self._beats.clear()
        self._overdue(0.0)
        deadline = time.monotonic() + 4 * self._interval
        while time.monotonic() < deadline:
            self._store.add(f"beat/{self._rank}", 1)
            if self._store.check(["failed"]):
                return []
            time.sleep(self._interval / 4)
        return [rank for rank in self._overdue(3 * self._interval) if rank != self._rank]

    def _bring_down(self, cause: str) -> None:
        print(f"[{self._name(self._rank)}] {cause}", file=sys.stderr, flush=True)
        if self._ending.wait(self._grace_seconds):
            return
        print(f"[{self._name(self._rank)}] ends while it is here:", file=sys.stderr, flush=True)
        traces.dump_stacks()
        self._write_traces()
        self._exit(1)

    def _write_traces(self) -> None:
        if self._folder is None:
            return
        for path in traces.write(self._folder, self._rank):
            # Not the node's name: the store may be gone, or in use by the other thread.
            print(f"[rank {self._rank}] wrote {path}", file=sys.stderr, flush=True)

    def _lost_message(self, ranks: list[int]) -> str:
        names = ", ".join(self._name(rank) for rank in ranks[:4]) + (" and others" if len(ranks) > 4 else "")
        return (
            f"{names} gave no sign of life: killed (by the system, for memory, or by hand), or the node or its network "
            "is gone"
        )

    def _name(self, rank: int) -> str:
        node = self._store.get(f"node/{rank}").decode() if self._store.check([f"node/{rank}"]) else "?"
        return f"rank {rank} on {node}"

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if condition():
                    return
            time.sleep(0.05)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective may have failed since another rank is gone: what torch and its backends say then."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "timed out", "socket", "lost contact"))
