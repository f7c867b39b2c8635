"""Ranks that watch each other, so that one that fails ends the others with its own words, not in a hanging collective.

Two threads run on every rank. The *speaker* alone uses the store of the process group: it says that the rank lives and
asks whether another has failed. Rank 0's speaker also counts silent ranks, and rank 1's checks rank 0. The *guard* ends
the process once there is a cause, or once the store has not answered for too long, since a call of the store may never
return. One rank *owns* a failure, the first to report it. The others print one line each. The owner's traceback and
the cause come last.
"""

import atexit
import contextlib
import faulthandler
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError, PrefixStore, TCPStore

from lightning_shard.cluster import traces
from lightning_shard.cluster.preflight import Rendezvous, multi_get, multi_set
from lightning_shard.cluster.traces import Progress, Report, user_frame, words_of
from lightning_shard.errors import ShardError

INTERVAL_SECONDS = 1.0  # Between two signs of life. Longer with more than 4,096 ranks: all speak to one process.
GRACE_SECONDS = 5.0  # For a main thread to end by itself once the cause is known.
_FAREWELL_SECONDS = 3.0  # for which ranks wait for each other's last words
_STORE_SECONDS = 10.0  # for one answer of the store
_SUSPICION = 5  # intervals from a lost connection to the name of the silent rank
_ENDED = "ended"  # in place of a sign of life

_KEEPER_LOST = (
    "rank 0 was lost, or the network to it: {}, which it (or its torchrun) keeps. It was killed or stopped, or a node "
    "is gone."
)
_SILENT = (
    "gave no sign of life: killed (by the system, for memory, or by hand) or stopped, or a node or its network is gone"
)


class RankWatch:
    """The two threads of one rank, from `start_threads` to `end_run` or `stop_threads`."""

    def __init__(
        self,
        at: Rendezvous,
        lost_seconds: float,
        *,
        run: int = 0,
        folder: Path | None = None,
        progress: Progress | None = None,
        stuck_seconds: float | None = None,
        grace_seconds: float = GRACE_SECONDS,
        exit_process: Callable[[int], None],
    ) -> None:
        """Connect to the store of the process group, over a connection of the speaker's own.

        A rank that is silent for ``lost_seconds`` is lost. ``run`` numbers the runs on one process group. A stuck rank
        writes its traces into ``folder``. With ``progress`` of the main thread, if no rank moves for ``stuck_seconds``,
        the rank that the others wait for is blamed. The main thread has ``grace_seconds`` to end by itself once the
        cause is known, then ``exit_process`` is called.
        """
        timeout = timedelta(seconds=_STORE_SECONDS)
        store = TCPStore(at.address, at.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store = PrefixStore(f"watch/{at.agent or 0}/{run}", store)
        self._rank, self._size = at.rank, at.world_size
        self._name = f"rank {at.rank} on {socket.gethostname()}"
        self._store.set(f"name/{self._rank}", self._name)
        self._progress, self._stuck_seconds = progress, stuck_seconds or float("inf")
        self._interval = INTERVAL_SECONDS * max(1.0, at.world_size / 4096)
        self._lost_seconds = lost_seconds
        self._folder, self._grace_seconds, self._exit = folder, grace_seconds, exit_process
        # Set by the main thread for the speaker to report.
        self._word: str | None = None  # the failure of this rank
        self._code = 1
        self._suspects = self._ended = self._finished = False
        # Set by the speaker.
        self._cause: tuple[int, str, int] | None = None  # the owner (-1: none), the failure, the exit code
        self._known = threading.Event()  # the cause is known, or that no rank is silent
        self._all_told = self._all_ended = self._all_gone = self._over = False
        self._told: set[str] = set()  # counters to which this rank has added
        self._beats = self._still = 0
        self._counter = SilenceCounter(self._store, self._rank, self._size, self._interval, lost_seconds)
        self._answered = time.monotonic()
        self._line_printed = False
        # The speaker has something to report, the main thread ends by itself, the threads have to end.
        self._wake, self._leaving, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._speaker = threading.Thread(target=self._speak, name="lightning_shard-watch", daemon=True)
        self._guard = threading.Thread(target=self._guard_process, name="lightning_shard-guard", daemon=True)

    # The main thread

    def start_threads(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            if not faulthandler.is_enabled():
                # NCCL's watchdog aborts a process whose collective does not end in time.
                faulthandler.enable(file=sys.__stderr__ or 2)
        self._speaker.start()
        self._guard.start()
        # For a process that ends without `end_run` or `report_failure`, and for the last words of one that failed.
        atexit.register(self.stop_threads)

    def end_run(self) -> None:
        """Say that the run has ended well on this rank. Rank 0 keeps the store and waits a moment for the others."""
        self._leaving.set()
        self._ended = True
        self._wait_until(lambda: self._all_ended if self._rank == 0 else "ended" in self._told)
        self.stop_threads()

    def report_failure(self, error: BaseException) -> str | None:
        """Tell the other ranks that this one raises ``error``, unless another rank's failure is the cause. Returns that
        cause. The owner's last words are printed by `stop_threads`, at the latest when the interpreter ends.
        """
        self._leaving.set()
        written = None
        # Words of torch and its backends in errors of collectives that lost a rank.
        signs = ("connection", "gloo", "nccl", "timed out", "socket", "lost contact")
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs):
            # The collective that failed, or did not end in time, is the last one of each rank's record.
            written = self._write_traces()
            self._suspects = True
            self._wake.set()
            # A silent rank is named by then.
            self._known.wait(_SUSPICION * self._interval + _FAREWELL_SECONDS)
        if self._cause is None:
            where = f" (at {place})" if (place := user_frame(error)) else ""
            self._code = 2 if isinstance(error, ShardError) else 1  # as the command line ends after either
            self._word = f"{self._name} failed: {type(error).__name__}: {words_of(error)}{where}"
            self._wait_until(lambda: self._cause is not None)
        owner, cause, _ = self._cause or (-1, _KEEPER_LOST.format("nothing is heard of the store"), 1)
        if owner == self._rank:
            self._wait_until(lambda: self._all_told)
            return None if cause == self._word else cause
        self._print_line(cause, written)
        if owner >= 0:
            self._wait_until(lambda: self._over)
        return cause

    def stop_threads(self) -> None:
        """Print the last words and end the threads. One in the store while the interpreter ends would abort it."""
        atexit.unregister(self.stop_threads)
        self._leaving.set()
        self._print_last_words()
        if self._over:
            # Rank 0 keeps the store.
            self._wait_until(lambda: self._all_gone if self._rank == 0 else "gone" in self._told)
        self._stopped.set()
        self._wake.set()
        # A store that has gone answers no more.
        seconds = 0.5 if self._cause is not None and self._cause[0] < 0 else _STORE_SECONDS
        for thread in (self._speaker, self._guard):
            if thread.is_alive():
                thread.join(seconds)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS + self._interval
        while self._speaker.is_alive() and not condition() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05 * self._interval)

    def _print_last_words(self) -> None:
        if self._cause is not None and self._cause[0] == self._rank and not self._finished:
            _print_error(f"[{self._name}] the cause: {self._cause[1]}")
            self._finished = True
            self._wait_until(lambda: self._over)

    def _print_line(self, cause: str, written: Path | None = None) -> None:
        if not self._line_printed:
            self._line_printed = True
            _print_error(f"[{self._name}] ends: {cause}" + (f" Its traces: {written}" if written else ""))

    # The speaker

    def _speak(self) -> None:
        with contextlib.suppress(Exception):
            while not self._stopped.is_set():
                with contextlib.suppress(DistStoreError):  # not in time: the store's host is busy
                    self._exchange_words()
                    self._answered = time.monotonic()
                self._wake.wait(self._interval)
                self._wake.clear()
            return
        if self._cause is None:
            self._cause = (-1, _KEEPER_LOST.format("the connection to the store broke"), 1)
        self._known.set()

    def _exchange_words(self) -> None:
        """Give a sign of life, report and ask, by a few requests at any number of ranks."""
        store = self._store
        self._beats += 1
        store.set(f"beat/{self._rank}", _ENDED if self._ended else f"{self._beats} {self._report_standstill()}")
        if self._suspects and not self._known.is_set():
            store.set("suspicion", "")
        if self._cause is None and (verdict := self._find_verdict()) is not None:
            self._cause = tuple(json.loads(verdict))
            self._known.set()
        if self._ended:
            self._all_ended = self._add_to_counter("ended") >= self._size
        if self._cause is not None and (self._line_printed or self._cause[0] == self._rank):
            self._all_told = self._add_to_counter("told") >= self._size
            if self._finished:
                store.set("over", "")
            self._over = store.check(["over"])
        if self._over and self._leaving.is_set():
            self._all_gone = self._add_to_counter("gone") >= self._size

    def _find_verdict(self) -> bytes | None:
        """The first failure that was reported, with its owner."""
        if self._word is not None:
            return self._store.compare_set("failed", "", json.dumps([self._rank, self._word, self._code]))
        if self._store.check(["failed"]):
            return self._store.get("failed")
        silent = self._counter.silent_ranks()
        if silent:
            self._size -= len(silent)  # nobody waits for their last words
            key = f"name/{silent[0]}"
            name = self._store.get(key).decode() if self._store.check([key]) else f"rank {silent[0]}"
            others = f" (and {len(silent) - 1} others)" * (len(silent) > 1)
            return self._store.compare_set("failed", "", json.dumps([self._rank, f"{name}{others} {_SILENT}", 1]))
        if self._suspects and self._store.check(["nobody is silent"]):
            self._known.set()
        return self._counter.blame_stuck_rank(self._still)

    def _report_standstill(self) -> int:
        """Count the halves of ``stuck_seconds`` since the main thread moved, 2 at most. Report its place at each."""
        if self._progress is None:
            return 0
        still = min(2, int(2 * self._progress.seconds / self._stuck_seconds))
        if still > self._still:
            try:
                at = traces.collective_position(traces.recorded_collectives())
                report = self._progress.report(self._name, line=traces.main_thread_line(), **at)
                told = json.dumps(asdict(report))
            except Exception:  # another torch's record
                return 0
            self._store.set(f"report/{self._rank}", told)
        self._still = still
        return still

    def _add_to_counter(self, name: str) -> int:
        """Add this rank to a counter, once, and return the count."""
        count = self._store.add(name, int(name not in self._told))
        self._told.add(name)
        return count

    # The guard

    def _guard_process(self) -> None:
        while not self._stopped.wait(min(1.0, self._interval)):
            if self._cause is None and time.monotonic() - self._answered > self._lost_seconds:
                silence = _KEEPER_LOST.format(f"for {self._lost_seconds:g} s nothing is heard of the store")
                self._cause = (-1, silence, 1)
                self._known.set()
            if self._cause is not None and not self._leaving.is_set():
                self._bring_down(*self._cause)
                return

    def _bring_down(self, owner: int, cause: str, code: int) -> None:
        with contextlib.suppress(Exception):
            # If something else hangs or holds the interpreter's lock.
            seconds = self._grace_seconds + 3 * _FAREWELL_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
        if owner != self._rank:
            self._print_line(cause)
        self._wake.set()
        if not self._leaving.wait(self._grace_seconds):
            written = self._write_traces()
            _print_error(f"[{self._name}] ends where it stands" + (f", which is in {written}" if written else ":"))
            if written is None:
                traces.dump_stacks()
            self._print_last_words()
            self._exit(code)
        faulthandler.cancel_dump_traceback_later()

    def _write_traces(self) -> Path | None:
        with contextlib.suppress(Exception):
            if self._folder is not None:
                return traces.write_traces(self._folder, self._rank)
        return None


class SilenceCounter:
    """Finds ranks that give no sign of life: rank 0 for all others, rank 1 for rank 0."""

    def __init__(self, store: PrefixStore, rank: int, size: int, interval: float, lost_seconds: float) -> None:
        ranks = range(1, size) if rank == 0 else range(int(rank == 1))
        self._counts_all = rank == 0
        self._store, self._keys, self._interval = store, [f"beat/{other}" for other in ranks], interval
        # All ranks know one interval after this check, and this rank checks once an interval.
        self._lost_seconds = max(lost_seconds / 2, lost_seconds - 2 * interval)
        # Nobody waits for a key that is not there yet.
        multi_set(store, self._keys, "")
        self._seen: dict[str, tuple[bytes, float]] = {}  # the last sign of life, and when it was first seen
        self._checked = time.monotonic()
        self._suspected: float | None = None
        self._size, self._still = size, 0

    def silent_ranks(self) -> list[int]:
        """Ranks that were silent for too long, or since another rank lost a connection."""
        if not self._keys:
            return []
        now = time.monotonic()
        if now - self._checked > 3 * self._interval:
            self._seen.clear()  # this process was stopped itself, or is starved
        self._checked = now
        for key, beat in zip(self._keys, multi_get(self._store, self._keys), strict=True):
            if key not in self._seen or self._seen[key][0] != beat:
                self._seen[key] = beat, now
        lost = self._silent_since(now - self._lost_seconds)
        if self._suspected is None and self._store.check(["suspicion"]):
            self._suspected = now
        elif not lost and self._suspected is not None and now > self._suspected + 3.5 * self._interval:
            lost = self._silent_since(now - 3 * self._interval)
            if not lost and self._counts_all:
                self._store.set("nobody is silent", "")
        return lost

    def blame_stuck_rank(self, own: int) -> bytes | None:
        """Warn of the rank that others wait for once all stand still, at twice the time give it the failure. ``own`` is
        this rank's count.
        """
        if not self._counts_all:
            return None
        beats = [beat.partition(b" ")[2] for beat, _ in self._seen.values()]
        still = min([own, *(int(beat or 0) for beat in beats)])
        before, self._still = self._still, still
        if still <= before:
            return None
        told = multi_get(self._store, [f"report/{rank}" for rank in range(self._size)])
        reports = {rank: Report(**json.loads(report)) for rank, report in enumerate(told)}
        culprits = traces.ranks_to_blame(reports)
        if not culprits:
            return None
        text = traces.describe_hang(reports, culprits)
        if still < 2 or not traces.is_certain(reports, culprits):
            _print_error(f"{text} (stuck_seconds)")
            return None
        return self._store.compare_set("failed", "", json.dumps([culprits[0], text, 1]))

    def _silent_since(self, when: float) -> list[int]:
        silent = [key for key, (beat, since) in self._seen.items() if since < when and beat != _ENDED.encode()]
        return [int(key.partition("/")[2]) for key in silent]


def _print_error(text: str) -> None:
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)
