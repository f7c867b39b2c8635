"""What fits: the plan of one engine, the largest batch, the fewest devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_shard.memory import MemoryAccount
from lightning_shard.planning.facts import Engine, ModelFacts, OptimizerFacts
from lightning_shard.planning.live import MEASURES, Segment
from lightning_shard.planning.moments import POINTS
from lightning_shard.planning.states import predict
from lightning_shard.planning.trace import Trace
from lightning_shard.planning.traffic import Nodes
from lightning_shard.planning.walk import Point, walk
from lightning_shard.precision.policy import PrecisionPolicy

LARGEST_BATCH = 2**20
MOST_NODES = 4096


@dataclass(frozen=True, kw_only=True)
class Traces:
    """A step at two batches, between which and beyond which every part is taken as linear."""

    one: Trace
    two: Trace | None = None
    """At twice the batch; None: only the batch of ``one`` is known."""

    @property
    def scales(self) -> bool:
        """Whether other batches are known."""
        if self.two is None:
            return False
        names = [[(s.phase, s.unit) for s in t.segments] for t in (self.one, self.two)]
        return names[0] == names[1]

    def at(self, batch: int) -> Trace:
        """The step at another batch."""
        if batch == self.one.batch_size or self.two is None:
            return self.one
        ratio = (batch - self.one.batch_size) / (self.two.batch_size - self.one.batch_size)
        segments = [_between(a, b, ratio) for a, b in zip(self.one.segments, self.two.segments, strict=True)]
        return replace(
            self.one,
            segments=tuple(segments),
            batch_size=batch,
            forward_flops=_line(self.one.forward_flops, self.two.forward_flops, ratio),
            backward_flops=_line(self.one.backward_flops, self.two.backward_flops, ratio),
        )


def _between(a: Segment, b: Segment, ratio: float) -> Segment:
    return replace(a, **{name: _line(getattr(a, name), getattr(b, name), ratio) for name in MEASURES})  # type: ignore[arg-type]


def _line(a: int, b: int, ratio: float) -> int:
    return max(0, round(a + (b - a) * ratio))


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that the memory of a rank follows from, but for the engine and the batch."""

    model: ModelFacts
    policy: PrecisionPolicy
    optimizer: OptimizerFacts
    traces: Traces | None
    """None: activations are not known."""

    micro_batches: int = 1

    def points(self, engine: Engine, batch: int | None = None) -> list[Point]:
        """The moments of a step; without a trace, the three of the arithmetic."""
        if self.traces is None:
            moments = predict(self.model, engine, self.policy, self.optimizer, micro_batches=self.micro_batches)
            return [Point(name=name, account=getattr(moments, name)) for name in POINTS]
        trace = self.traces.one if batch is None else self.traces.at(batch)
        return walk(self.model, engine, self.policy, self.optimizer, trace, micro_batches=self.micro_batches)

    def peak(self, engine: Engine, batch: int | None = None) -> MemoryAccount:
        """The account at the moment when the device holds most."""
        return max(self.points(engine, batch), key=lambda p: p.account.device.total).account


def largest_batch(run: Run, engine: Engine, memory: int) -> int | None:
    """The most samples per rank and micro-batch that fit into ``memory`` bytes; 0: none; None: not known."""
    if run.traces is None or not run.traces.scales:
        return None

    def fits(batch: int) -> bool:
        return run.peak(engine, batch).device.total <= memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    return _last(low, high, fits)


def fewest_devices(run: Run, engine_on: Callable[[Nodes], Engine | None], devices: int, memory: int) -> Nodes | None:
    """The fewest devices on which the batch fits; None: it does on none.

    Args:
        run: the run at its own batch.
        engine_on: the engine on some machines; None: its settings do not fit that number.
        devices: of a node; more nodes are whole ones.
        memory: bytes of a device.
    """

    def fits(nodes: Nodes) -> bool:
        engine = engine_on(nodes)
        return engine is not None and run.peak(engine).device.total <= memory

    for count in range(1, devices + 1):
        if fits(Nodes(nodes=1, devices=count)):
            return Nodes(nodes=1, devices=count)
    low, high = 1, 2
    while not fits(Nodes(nodes=high, devices=devices)):
        low, high = high, 2 * high
        if low >= MOST_NODES:
            return None
    return Nodes(nodes=_last(low, high, lambda n: not fits(Nodes(nodes=n, devices=devices))) + 1, devices=devices)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number for which ``holds`` does, which it does at ``low`` and not at ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def shown_points(points: Sequence[Point]) -> list[Point]:
    """The moments worth a column: the peak of forward, of backward with its reductions, and the step."""
    found = []
    for start in ("forward", ("backward", "reduction", "end of"), ("optimizer", "step")):
        matching = [p for p in points if p.name.startswith(start)]
        if matching:
            found.append(max(matching, key=lambda p: p.account.device.total))
    return found or list(points)
