"""What this process writes in the background, for those who read, remove or replace checkpoints meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Write:
    """A checkpoint that a thread writes. One rank's; the thread agrees with those of the other ranks."""

    def __init__(self, work: Callable[[Write], None]) -> None:
        """Start ``work(self)`` in a thread; it calls `tidy` once the checkpoint is whole."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._afterwards: list[Callable[[], None]] | None = []
        # A daemon: a rank whose peers are lost must be able to end before the backend's timeout.
        self._thread = threading.Thread(target=self._run, args=(work,), name="lightning_shard-save", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self._thread.is_alive()

    def wait(self) -> BaseException | None:
        """Wait for the end; what it failed of, the same on every rank, or None."""
        self._thread.join()
        return self._failure

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the checkpoint is whole, which may be now; never, if it does not become whole."""
        with self._lock:
            if self._afterwards is not None:
                self._afterwards.append(act)
            else:
                act()

    def tidy(self) -> None:
        """The checkpoint is whole: do what waited for it."""
        with self._lock:
            waiting, self._afterwards = self._afterwards or [], None
            for act in waiting:
                act()

    def _run(self, work: Callable[[Write], None]) -> None:
        try:
            work(self)
        except BaseException as error:  # raised where the outcome is asked for
            self._failure = error
        finally:
            _running.discard(self)


_running: set[Write] = set()


def settle() -> None:
    """Wait until this process writes nothing in the background, for who is going to read. Any rank may call it.

    A thread that writes may call it too, and does not wait for itself. What failed is told to who saved.
    """
    for write in list(_running):
        if write._thread is not threading.current_thread():
            write.wait()
