"""The time that Lightning spends in actions that it names to its profiler."""

from __future__ import annotations

import time

from lightning.pytorch.profilers import Profiler

from lightning_shard._lightning import Replacements

DATA = ".train_dataloader_next"
"""Waiting for the next training batch; the name begins with the loop's."""

CHECKPOINT = "save_checkpoint"


class ActionClock:
    """Sums up seconds of `DATA` and `CHECKPOINT`, whichever profiler the run has."""

    def __init__(self, profiler: Profiler) -> None:
        """Listen to ``profiler``, until `detach`."""
        self.seconds = {DATA: 0.0, CHECKPOINT: 0.0}
        self._started: dict[str, float] = {}
        self._start, self._stop = profiler.start, profiler.stop
        # Lightning calls both by name, from `profile` too.
        self._replacements = Replacements()
        self._replacements.replace(profiler, "start", self._on_start)
        self._replacements.replace(profiler, "stop", self._on_stop)

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
        self._replacements.restore()


def _action(name: str) -> str | None:
    if name == CHECKPOINT:
        return CHECKPOINT
    return DATA if name.endswith(DATA) else None
