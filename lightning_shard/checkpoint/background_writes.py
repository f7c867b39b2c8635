"""What this process writes in the background, for code that reads, removes or replaces checkpoints meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWrite:
    """A checkpoint that a thread of this rank writes; the thread agrees with those of the other ranks."""

    def __init__(self, work: Callable[[BackgroundWrite], None]) -> None:
        """Start ``work(self)`` in a thread; it calls `completed` once the checkpoint is complete."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] | None = []
        # A daemon: a rank whose peers are lost must be able to end before the backend's timeout.
        self.thread = threading.Thread(target=self._run, args=(work,), name="lightning_shard-save", daemon=True)
        _running.add(self)
        self.thread.start()

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> BaseException | None:
        """Wait for the end; the error that it failed with, the same on every rank, or None."""
        self.thread.join()
        return self._failure

    def when_complete(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the checkpoint is complete, which may be now; never, if it does not become complete."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(act)
            else:
                act()

    def completed(self) -> None:
        """The checkpoint is complete: do what waited for it."""
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
            for act in waiting:
                act()

    def _run(self, work: Callable[[BackgroundWrite], None]) -> None:
        try:
            work(self)
        except BaseException as error:  # raised where the outcome is asked for
            self._failure = error
        finally:
            _running.discard(self)


_running: set[BackgroundWrite] = set()


def settle() -> None:
    """Wait until this process writes nothing in the background, before something is read. Any rank may call it.

    A thread that writes may call it too, and does not wait for itself. Failures are raised where the save was begun.
    """
    for write in list(_running):
        if write.thread is not threading.current_thread():
            write.wait()
