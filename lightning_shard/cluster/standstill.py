"""A run in which nothing moves any more: which rank the others wait for, and where each of them is."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BATCH = ("data", "forward", "backward", "step", "validation")
"""Phases in which a rank that keeps the others waiting has no good reason to; a save or a callback may have one."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a rank stands still, as it says by itself."""

    name: str  # Of the rank.
    seconds: float  # For which it has not moved.
    phase: str  # data, forward, backward, step, save or validation; the name of a hook.
    step: int  # Optimizer steps so far.
    line: str  # Of its main thread, in words that follow others.
    waits: Sequence[Any] | None  # See `traces.position`, as are the next two.
    recent: Sequence[Sequence[Any]]
    last: Mapping[str, int]

    def place(self) -> str:
        where = f"in {self.phase} after step {self.step}"
        if self.waits is None:
            return where + self.line
        group, number, what, caller = self.waits
        return f"{where}, where it waits in {what}, number {number} of group {group}{caller or self.line}"


class Progress:
    """What the main thread does: it tells of every action's beginning and end; another thread asks."""

    def __init__(self, step: Callable[[], int] = lambda: 0) -> None:
        """``step`` gives the optimizer steps so far, in any thread."""
        self._step = step
        self._actions: list[str] = []
        self._moved = time.monotonic()

    def begin(self, action: str) -> None:
        self._actions.append(action)
        self._moved = time.monotonic()

    def end(self, action: str) -> None:
        """It ends, and with it those inside of it that an error left."""
        while self._actions and self._actions.pop() != action:
            pass
        self._moved = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since an action began or ended; 0 before the first."""
        return time.monotonic() - self._moved if self._actions else 0.0

    def report(self, name: str, **where: Any) -> Report:
        """Where this rank stands; ``where``: further fields of `Report`."""
        action = next(iter(self._actions[-1:]), "")
        phase = next((phase for ending, phase in _PHASES.items() if action.endswith(ending)), action)
        return Report(name=name, seconds=self.seconds, phase=phase, step=self._step(), **where)


_PHASES = {
    "_next": "data",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "step",
    "save_checkpoint": "save",
    "validation_step": "validation",
    "run_training_epoch": "the epoch's loop",
}
"""How the Trainer's names of actions end, and what they are."""


def blame(reports: Mapping[int, Report]) -> list[int]:
    """The ranks that the others wait for; none if all wait in the same collective, or none waits in one.

    The rule: whoever is in no collective while others are; else whoever has not called one in which others wait; and
    where that is said of all, or of none, those that are in another collective than most.
    """
    waiting = {rank: report.waits for rank, report in reports.items() if report.waits is not None}
    if not waiting:
        return []
    if len(waiting) < len(reports):
        return sorted(set(reports) - set(waiting))
    first: dict[str, int] = {}  # the farthest that a rank waits in, by group
    for group, number, *_ in waiting.values():
        first[group] = max(number, first.get(group, number))
    behind = [rank for rank, report in reports.items() if any(report.last.get(g, n) < n for g, n in first.items())]
    if 0 < len(behind) < len(reports):
        return sorted(behind)
    places = {rank: tuple(waits[:3]) for rank, waits in waiting.items()}
    (most, count), *others = Counter(places.values()).most_common()
    if not others:
        return []
    if others[-1][1] == count:  # as many, of two ranks as a rule
        most = places[max(places)]
    return sorted(rank for rank in places if places[rank] != most)


def describe(reports: Mapping[int, Report], culprits: Sequence[int]) -> str:
    first = reports[culprits[0]]
    more = f" (as {len(culprits) - 1} others)" if len(culprits) > 1 else ""
    text = f"{first.name} has not moved for {first.seconds:.0f} s{more}: it is {first.place()}"
    others = [report for rank, report in reports.items() if rank not in culprits]
    if not others:
        return text
    # One that waits for it, rather than for whoever does.
    other = min(others, key=lambda report: report.waits is None or report.waits[0] not in first.last)
    waits = [] if first.waits is None else list(first.waits)
    called = [entry for entry in other.recent if list(entry[:2]) == waits[:2] and entry[2] != waits[2]]
    if not called:
        return f"{text}. {other.name} is {other.place()}"
    # On some backends it went on from there.
    on = "" if list(called[0]) == list(other.waits or ()) else f" called {called[0][2]}{called[0][3]}; it"
    return f"{text}. In its place {other.name}{on} is {other.place()}"


def is_certain(reports: Mapping[int, Report], culprits: Sequence[int]) -> bool:
    """Whether it can't come to an end by itself, or should have long ago."""
    return all(reports[rank].waits is not None or reports[rank].phase in _BATCH for rank in culprits)
