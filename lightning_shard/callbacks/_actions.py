"""The time that Lightning spends in actions that it names to its profiler."""

from __future__ import annotations

import time

from lightning.pytorch.profilers import Profiler

DATA = ".train_dataloader_next"
"""Waiting for the next training batch; the name begins with the loop's."""

CHECKPOINT = "save_checkpoint"


class ActionClock:
    """Sums up seconds of `DATA` and `CHECKPOINT`, whichever profiler the run has."""

    def __init__(self, profiler: Profiler) -> None:
        """Listen to ``profiler``, until `detach`."""
        self.seconds = {DATA: 0.0, CHECKPOINT: 0.0}
        self._started: dict[str, float] = {}
        self._profiler = profiler
        self._start, self._stop = profiler.start, profiler.stop
        # On the instance: Lightning calls both by name, from `profile` too.
        vars(profiler).update(start=self._on_start, stop=self._on_stop)

    def _on_start(self, action_name: str) -> None:
        self._start(action_name)
        if (action := _action(action_name)) is not None:
            self._started[action] = time.perf_counter()

    def _on_stop(self, action_name: str) -> None:
        if (action := _action(action_name)) is not None and action in self._started:
            self.seconds[action] += time.perf_counter() - self._started.pop(action)
        self._stop(action_name)

    def detach(self) -> None:
        """Leave the profiler as it was."""
        for name in ("start", "stop"):
            vars(self._profiler).pop(name, None)


def _action(name: str) -> str | None:
    if name == CHECKPOINT:
        return CHECKPOINT
    return DATA if name.endswith(DATA) else None
