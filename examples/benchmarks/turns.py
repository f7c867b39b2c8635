"""Contestants, each in processes of its own, and how often they run in turn: a machine that is busy is so for all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.processes import PeakMemory, Place, reason
from examples.benchmarks.python_loops import LOOPS
from examples.benchmarks.trainers import TrainerLoop
from examples.benchmarks.workload import Workload


class Contestant(Protocol):
    """Something that trains."""

    losses: Sequence[Tensor]

    def run(self, steps: int) -> None:
        """Take optimizer steps."""

    def end(self) -> None:
        """Release objects that keep the process from ending."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often everything is done."""

    rounds: int = 8
    steps: int = 5
    """Steps in a block. A round has a block of each contestant."""
    warmup: int = 3
    """Steps of each that do not count."""
    clock: str = "wall"
    """"cpu": the seconds that this process computed, without those that it waited, for a CPU too."""

    until: float | None = None
    """The moment of ``time.monotonic`` at which processes are ended. None: each has 20 minutes."""

    @property
    def seconds_left(self) -> float:
        """How long processes that start now may take."""
        return 1200.0 if self.until is None else self.until - time.monotonic()

    @property
    def total(self) -> int:
        """Steps of each contestant."""
        return self.warmup + self.rounds * self.steps


@dataclass(kw_only=True)
class Result:
    """Seconds and losses, as measured."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per step of each block, of the slowest rank, by contestant."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """The loss in every step, of one rank after the other."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a contestant did not run."""


def build(name: str, work: Workload, place: Place, plan: Plan, **options: Any) -> Contestant:
    """The contestant of this name."""
    if name in LOOPS:
        return LOOPS[name](work, place)
    return TrainerLoop(name, work, place, steps=plan.total, **options)


def serve(
    place: Place,
    pipes: Sequence[Connection],
    name: str,
    work: Workload,
    plan: Plan,
    make: Callable[..., Contestant] = build,
) -> None:
    """Train as a contestant in processes of its own. Each rank says why it does not run, or None, then seconds per step
    for each number of steps that it is told to take, and the losses of all once it is told to take none.
    """
    for rank, pipe in enumerate(pipes):
        if rank != place.rank:
            pipe.close()
    pipe = pipes[place.rank]
    contestant, why = None, None
    try:
        contestant = make(name, work, place, plan)
        contestant.run(plan.warmup)
    except (AttributeError, NameError, TypeError):
        raise  # of this code
    except Exception as error:
        why = why_not(error)
    # An engine that one rank alone can't run would leave the others waiting.
    whys: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(whys, why)
    why = next((w for w in whys if w is not None), None)
    pipe.send(why)
    if why is not None or contestant is None:
        return
    now = time.process_time if plan.clock == "cpu" else place.now
    while steps := pipe.recv():
        place.meet()
        start = now()
        contestant.run(steps)
        pipe.send((now() - start) / steps)
    pipe.send([loss.item() for loss in contestant.losses[: plan.total]])
    contestant.end()


SLEEP, CONTROL = 0.05, "+sleep"
"""Part of each step that a contestant sleeps after it whose name ends so: a race that does not see it sees nothing."""


class Slowed:
    """A contestant with some sleep in each step."""

    def __init__(self, contestant: Contestant, place: Place) -> None:
        """Slow ``contestant`` down, which runs at ``place``."""
        self._contestant, self._place = contestant, place
        self.end = contestant.end

    @property
    def losses(self) -> Sequence[Tensor]:
        """Those of the contestant."""
        return self._contestant.losses

    def run(self, steps: int) -> None:
        """Take steps, and sleep."""
        for _ in range(steps):
            start = self._place.now()
            self._contestant.run(1)
            time.sleep(SLEEP * (self._place.now() - start))


def build_with_control(name: str, work: Workload, place: Place, plan: Plan) -> Contestant:
    """The contestant of this name, with sleep if the name says so."""
    base, slowed, _ = name.partition(CONTROL)
    contestant = build(base, work, place, plan)
    return Slowed(contestant, place) if slowed else contestant


def why_not(error: Exception) -> str:
    """Why an engine did not run, in a line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return reason(error)


def peak(place: Place, name: str, work: Workload, plan: Plan) -> int:
    """The most bytes that this rank needs for a contestant alone, above those before it was built."""
    memory = PeakMemory(place)
    contestant = build(name, work, place, plan)
    contestant.run(plan.total)
    found = memory.bytes()
    contestant.end()
    return found


# The results


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and extremes."""

    median: float
    low: float
    high: float
    smallest: float
    largest: float
    interval: tuple[float, float]
    """A 95 % confidence interval of the median. Of fewer than 6 values, the smallest and the largest."""


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(
        median=statistics.median(values),
        low=low,
        high=high,
        smallest=min(values),
        largest=max(values),
        interval=_interval(sorted(values)),
    )


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Order statistics about the median: of n values, B(n, 1/2) are below it, whatever their distribution is."""
    count = len(ordered)
    outside, skipped = 0.0, 0
    while outside + (more := 2 * math.comb(count, skipped) / 2**count) <= 0.05:
        outside += more
        skipped += 1
    # `skipped` values may be left out at each end. The interval begins with the last of them.
    first = max(skipped - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def paired(seconds: Sequence[float], reference: Sequence[float]) -> Spread:
    """Of the ratios of blocks of the same round."""
    return spread([own / other for own, other in zip(seconds, reference, strict=True)])


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two loss curves, NaN if there is one in them."""
    found = [abs(own - other) / abs(other) for own, other in zip(losses, reference, strict=True)]
    return math.nan if any(math.isnan(one) for one in found) else max(found)
