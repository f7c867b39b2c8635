"""A rank that fails brings the others down with its own words, instead of leaving them in a collective.

Two threads on every rank. The *speaker* alone uses the store of the process group: it says that the rank lives, and
asks whether another has failed; rank 0's also counts who is silent, and rank 1's whether rank 0 is. The *guard* ends
the process once there is a cause, or once the store has not answered for too long: a call of the store may never
return. One rank *owns* a failure, the first to say it. The others print one line each; the owner's traceback and the
cause come last.
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

INTERVAL_SECONDS = 1.0  # Between two signs of life; longer with more than 4,096 ranks, which all speak to one process.
GRACE_SECONDS = 5.0  # How long a main thread has to end by itself once the cause is known.
_PART_OF_TIMEOUT, _COLLECTIVES_SECONDS = 0.8, 5.0  # how late a collective is told of, and how often that is looked at

_FAREWELL_SECONDS = 3.0  # how long ranks wait for each other's last words

_STORE_SECONDS = 10.0  # how long the store may take to give what is there

_KEEPER_LOST = (
    "rank 0 was lost, or the network to it: {}, which it (or its torchrun) keeps. It was killed or stopped, or a node "
    "is gone."
)
_SILENT = (
    "gave no sign of life: killed (by the system, for memory, or by hand) or stopped, or a node or its network is gone"
)


class Watch:
    """The threads of one rank, from `start` to `end` or `close`."""

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
        """Connect to the store of the process group, over a connection of the speaker's own. ``run``: number of the run
        on this group. A rank that is silent for ``lost_seconds`` is lost; one that is stuck writes its traces into
        ``folder``. ``progress``: of the main thread, if it is looked at: when no rank gets on for ``stuck_seconds``,
        the one that the others wait for is blamed. ``grace_seconds``: for the main thread to end by itself once the
        cause is known, before ``exit_process``.
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
        # What the main thread has the speaker say.
        self._word: str | None = None  # the failure of this rank
        self._code = 1
        self._suspects = self._ended = self._finished = False
        # What the speaker knows.
        self._cause: tuple[int, str, int] | None = None  # the owner (-1: none), what happened, the exit code
        self._known = threading.Event()  # of the cause, or that nobody is silent
        self._all_told = self._all_ended = self._all_gone = self._over = False
        self._told: set[str] = set()  # counters to which this rank has added
        self._beats = self._still = 0
        self._counter = _Counter(self._store, self._rank, self._size, self._interval, lost_seconds)
        self._answered = time.monotonic()
        self._line_printed = self._wrote_ahead = False
        self._looks_again = 0.0
        # Something is to be said; the main thread ends by itself; the threads are to end.
        self._wake, self._leaving, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._speaker = threading.Thread(target=self._speak, name="lightning_shard-watch", daemon=True)
        self._guard = threading.Thread(target=self._look, name="lightning_shard-guard", daemon=True)

    # The main thread

    def start(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            if not faulthandler.is_enabled():
                # NCCL's watchdog aborts a process whose collective does not end in time.
                faulthandler.enable(file=sys.__stderr__ or 2)
        self._speaker.start()
        self._guard.start()
        # For a process that ends without `end` or `failed`, and for the last words of one that failed.
        atexit.register(self.close)

    def end(self) -> None:
        """The run has ended well on this rank; rank 0, which keeps the store, waits a moment for the others."""
        self._leaving.set()
        self._ended = True
        self._until(lambda: self._all_ended if self._rank == 0 else "ended" in self._told)
        self.close()

    def failed(self, error: BaseException) -> str | None:
        """This rank raises ``error``: tell the others, unless it is the outcome of another's failure, which is
        returned. The owner's last words are said by `close`, at the latest when the interpreter ends.
        """
        self._leaving.set()
        written = None
        # What torch and its backends say where a collective may have failed since another rank is gone.
        signs = ("connection", "gloo", "nccl", "timed out", "socket", "lost contact")
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs):
            # The collective that failed, or did not end in time, is the last one of each rank's record.
            written = self._write_traces()
            self._suspects = True
            self._wake.set()
            # Whoever is silent is named by then.
            self._known.wait(_SUSPICION * self._interval + _FAREWELL_SECONDS)
        if self._cause is None:
            where = f" (at {place})" if (place := user_frame(error)) else ""
            self._code = 2 if isinstance(error, ShardError) else 1  # as the command line ends after either
            self._word = f"{self._name} failed: {type(error).__name__}: {words_of(error)}{where}"
            self._until(lambda: self._cause is not None)
        owner, cause, _ = self._cause or (-1, _KEEPER_LOST.format("nothing is heard of the store"), 1)
        if owner == self._rank:
            self._until(lambda: self._all_told)
            return None if cause == self._word else cause
        self._print_line(cause, written)
        if owner >= 0:
            self._until(lambda: self._over)
        return cause

    def close(self) -> None:
        """Say the last words, and let the threads end: one in the store while the interpreter ends aborts it."""
        atexit.unregister(self.close)
        self._leaving.set()
        self._say_last_words()
        if self._over:
            # Rank 0 keeps the store.
            self._until(lambda: self._all_gone if self._rank == 0 else "gone" in self._told)
        self._stopped.set()
        self._wake.set()
        # Where the store has gone there is nothing to wait for.
        seconds = 0.5 if self._cause is not None and self._cause[0] < 0 else _STORE_SECONDS
        for thread in (self._speaker, self._guard):
            if thread.is_alive():
                thread.join(seconds)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS + self._interval
        while self._speaker.is_alive() and not condition() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05 * self._interval)

    def _say_last_words(self) -> None:
        if self._cause is not None and self._cause[0] == self._rank and not self._finished:
            _say(f"[{self._name}] the cause: {self._cause[1]}")
            self._finished = True
            self._until(lambda: self._over)

    def _print_line(self, cause: str, written: Path | None = None) -> None:
        if not self._line_printed:
            self._line_printed = True
            _say(f"[{self._name}] ends: {cause}" + (f" What it was in: {written}" if written else ""))

    # The speaker

    def _speak(self) -> None:
        with contextlib.suppress(Exception):
            while not self._stopped.is_set():
                with contextlib.suppress(DistStoreError):  # not in time: the store's host is busy
                    self._exchange()
                    self._answered = time.monotonic()
                self._wake.wait(self._interval)
                self._wake.clear()
            return
        if self._cause is None:
            self._cause = (-1, _KEEPER_LOST.format("the connection to the store broke"), 1)
        self._known.set()

    def _exchange(self) -> None:
        """Give a sign of life, say and ask; a few requests, whatever the number of ranks."""
        store = self._store
        self._beats += 1
        store.set(f"beat/{self._rank}", _ENDED if self._ended else f"{self._beats} {self._standstill()}")
        if self._suspects and not self._known.is_set():
            store.set("suspicion", "")
        if self._cause is None and (verdict := self._verdict()) is not None:
            self._cause = tuple(json.loads(verdict))
            self._known.set()
        if self._ended:
            self._all_ended = self._add("ended") >= self._size
        if self._cause is not None and (self._line_printed or self._cause[0] == self._rank):
            self._all_told = self._add("told") >= self._size
            if self._finished:
                store.set("over", "")
            self._over = store.check(["over"])
        if self._over and self._leaving.is_set():
            self._all_gone = self._add("gone") >= self._size

    def _verdict(self) -> bytes | None:
        """What has failed, and who owns that: what was said first."""
        if self._word is not None:
            return self._store.compare_set("failed", "", json.dumps([self._rank, self._word, self._code]))
        if self._store.check(["failed"]):
            return self._store.get("failed")
        silent = self._counter.silent()
        if silent:
            self._size -= len(silent)  # whose last words nobody waits for
            known = [f"name/{rank}" for rank in silent[:4] if self._store.check([f"name/{rank}"])]
            names = [name.decode() for name in multi_get(self._store, known)] or [f"rank {silent[0]}"]
            others = f" and {len(silent) - len(names)} others" * (len(silent) > len(names))
            lost = f"{', '.join(names)}{others} {_SILENT}"
            return self._store.compare_set("failed", "", json.dumps([self._rank, lost, 1]))
        if self._suspects and self._store.check(["nobody is silent"]):
            self._known.set()
        return self._counter.stuck(self._still)

    def _standstill(self) -> int:
        """How many halves of ``stuck_seconds`` the main thread has not got on for, 2 at most; says where at each."""
        if self._progress is None:
            return 0
        still = min(2, int(2 * self._progress.seconds / self._stuck_seconds))
        if still > self._still:
            try:
                at = traces.position(traces.recorded_collectives())
                report = self._progress.report(self._name, line=traces.main_thread_line(), **at)
                told = json.dumps(asdict(report))
            except Exception:  # another torch's record
                return 0
            self._store.set(f"report/{self._rank}", told)
        self._still = still
        return still

    def _add(self, name: str) -> int:
        """Add this rank to a counter, once; how many there are."""
        count = self._store.add(name, int(name not in self._told))
        self._told.add(name)
        return count

    # The guard

    def _look(self) -> None:
        while not self._stopped.wait(min(1.0, self._interval)):
            if self._cause is None and time.monotonic() - self._answered > self._lost_seconds:
                silence = _KEEPER_LOST.format(f"for {self._lost_seconds:g} s nothing is heard of the store")
                self._cause = (-1, silence, 1)
                self._known.set()
            if self._cause is not None and not self._leaving.is_set():
                self._bring_down(*self._cause)
                return
            self._look_at_collectives()

    def _look_at_collectives(self) -> None:
        """Write what this rank is in ahead of the timeout, after which NCCL's watchdog leaves no time for it."""
        if self._folder is None or self._wrote_ahead or time.monotonic() < self._looks_again:
            return
        self._looks_again = time.monotonic() + _COLLECTIVES_SECONDS
        with contextlib.suppress(Exception):
            if traces.overdue(_PART_OF_TIMEOUT):
                self._wrote_ahead = True
                written = self._write_traces()
                _say(f"[{self._name}] a collective nears its timeout. What this rank is in: {written}")

    def _bring_down(self, owner: int, cause: str, code: int) -> None:
        with contextlib.suppress(Exception):
            # Whatever else hangs, and whoever has the interpreter's lock.
            seconds = self._grace_seconds + 3 * _FAREWELL_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
        if owner != self._rank:
            self._print_line(cause)
        self._wake.set()
        if not self._leaving.wait(self._grace_seconds):
            written = self._write_traces()
            _say(f"[{self._name}] ends where it stands" + (f", which is in {written}" if written else ":"))
            if written is None:
                traces.dump_stacks()
            self._say_last_words()
            self._exit(code)
        faulthandler.cancel_dump_traceback_later()

    def _write_traces(self) -> Path | None:
        with contextlib.suppress(Exception):
            if self._folder is not None:
                return traces.write(self._folder, self._rank)
        return None


_ENDED = "ended"  # in place of a beat

_SUSPICION = 5  # intervals from a lost connection to the name of who is silent


class _Counter:
    """Who gives no sign of life, counted on one rank for all: by rank 0, and by rank 1 whether rank 0 does."""

    def __init__(self, store: PrefixStore, rank: int, size: int, interval: float, lost_seconds: float) -> None:
        ranks = range(1, size) if rank == 0 else range(int(rank == 1))
        self._counts_all = rank == 0
        self._store, self._keys, self._interval = store, [f"beat/{other}" for other in ranks], interval
        # What is seen at one look is known to all after the next of theirs.
        self._lost_seconds = max(lost_seconds / 2, lost_seconds - 2 * interval)
        # Nobody waits for a key that is not there yet.
        multi_set(store, self._keys, "")
        self._seen: dict[str, tuple[bytes, float]] = {}  # the last beat, and when it was first seen
        self._looked = time.monotonic()
        self._suspected: float | None = None
        self._size, self._still = size, 0

    def silent(self) -> list[int]:
        """Those who were silent for too long, or since another rank lost a connection."""
        if not self._keys:
            return []
        now = time.monotonic()
        if now - self._looked > 3 * self._interval:
            self._seen.clear()  # this process was stopped itself, or is starved
        self._looked = now
        for key, beat in zip(self._keys, multi_get(self._store, self._keys), strict=True):
            if key not in self._seen or self._seen[key][0] != beat:
                self._seen[key] = beat, now
        lost = self._since(now - self._lost_seconds)
        if self._suspected is None and self._store.check(["suspicion"]):
            self._suspected = now
        elif not lost and self._suspected is not None and now > self._suspected + 3.5 * self._interval:
            lost = self._since(now - 3 * self._interval)
            if not lost and self._counts_all:
                self._store.set("nobody is silent", "")
        return lost

    def stuck(self, own: int) -> bytes | None:
        """Once no rank gets on for ``own``: warn of the one that others wait for; at twice the time have it end all."""
        if not self._counts_all:
            return None
        beats = [beat.partition(b" ")[2] for beat, _ in self._seen.values()]
        still = min([own, *(int(beat or 0) for beat in beats)])
        before, self._still = self._still, still
        if still <= before:
            return None
        told = multi_get(self._store, [f"report/{rank}" for rank in range(self._size)])
        reports = {rank: Report(**json.loads(report)) for rank, report in enumerate(told)}
        culprits = traces.blame(reports)
        if not culprits:
            return None
        text = traces.describe(reports, culprits)
        if still < 2 or not traces.is_certain(reports, culprits):
            _say(f"{text} (stuck_seconds)")
            return None
        return self._store.compare_set("failed", "", json.dumps([culprits[0], text, 1]))

    def _since(self, when: float) -> list[int]:
        silent = [key for key, (beat, since) in self._seen.items() if since < when and beat != _ENDED.encode()]
        return [int(key.partition("/")[2]) for key in silent]


def _say(text: str) -> None:
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)
