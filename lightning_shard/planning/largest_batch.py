"""What fits: the plan of one engine, the largest batch, the fewest devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_shard.engines.facts import EngineFacts
from lightning_shard.memory import MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.live_bytes import MEASURES, Segment
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.predict import predict, step_points
from lightning_shard.planning.step_memory import POINTS
from lightning_shard.planning.step_points import Point
from lightning_shard.planning.traffic import Nodes
from lightning_shard.precision.policy import PrecisionPolicy

LARGEST_BATCH = 2**20
MOST_NODES = 4096


@dataclass(frozen=True, kw_only=True)
class Traces:
    """A step at two batches or more, between which and beyond which every part is taken as linear."""

    one: Trace
    two: Trace | None = None  # At twice the batch; None: only the batch of ``one`` is known.
    more: tuple[Trace, ...] = ()  # At other batches.

    @property
    def scales(self) -> bool:
        """Whether other batches are known."""
        return self.two is not None and _parts(self.one) == _parts(self.two)

    def traced(self, batch: int) -> bool:
        """Whether the step was traced at that very batch."""
        return any(trace.batch_size == batch for trace in self._all)

    @property
    def _all(self) -> list[Trace]:
        return [self.one, *([] if self.two is None else [self.two]), *self.more]

    def at(self, batch: int) -> Trace:
        """The step at another batch, on the line through the two traces nearest to it, one on each side if there is."""
        for trace in self._all:
            if trace.batch_size == batch or self.two is None:
                return trace
        known = sorted((t for t in self._all if _parts(t) == _parts(self.one)), key=lambda t: t.batch_size)
        above = next((i for i, t in enumerate(known) if t.batch_size > batch), len(known) - 1)
        a, b = known[max(0, above - 1)], known[max(1, above)]
        ratio = (batch - a.batch_size) / (b.batch_size - a.batch_size)
        segments = [_between(x, y, ratio) for x, y in zip(a.segments, b.segments, strict=True)]
        return replace(
            self.one,
            segments=tuple(segments),
            batch_size=batch,
            forward_flops=_line(a.forward_flops, b.forward_flops, ratio),
            backward_flops=_line(a.backward_flops, b.backward_flops, ratio),
        )


def _parts(trace: Trace) -> list[tuple[str, str, bool]]:
    return [(s.phase, s.unit, s.has_gradients) for s in trace.segments]


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
    traces: Traces | None  # None: activations are not known.
    micro_batches: int = 1

    def points(self, engine: EngineFacts, batch: int | None = None) -> list[Point]:
        """The moments of a step; without a trace, the three of the arithmetic."""
        if self.traces is None:
            moments = predict(self.model, engine, self.policy, self.optimizer, micro_batches=self.micro_batches)
            return [Point(name=name, account=getattr(moments, name)) for name in POINTS]
        trace = self.traces.one if batch is None else self.traces.at(batch)
        return step_points(self.model, engine, self.policy, self.optimizer, trace, micro_batches=self.micro_batches)

    def peak(self, engine: EngineFacts, batch: int | None = None) -> MemoryAccount:
        """The account at the moment when the device holds most."""
        return max(self.points(engine, batch), key=lambda p: p.account.device.total).account


def largest_batch(run: Run, engine: EngineFacts, memory: int) -> int | None:
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


MOST_TRACES = 8
"""That are made to confirm a batch."""


def confirmed_batch(
    run: Run, engine: EngineFacts, memory: int, trace_at: Callable[[int], Trace]
) -> tuple[int | None, Run, bool]:
    """`largest_batch`, whose own trace fits, and that of a batch a quarter larger (or 1) does not.

    A trace that says otherwise makes the line better on which the next batch is looked for.

    Args:
        run: with traces of other batches.
        engine: on its machines.
        memory: bytes of a device.
        trace_at: traces the step at a batch.

    Returns:
        The batch, as from `largest_batch`; the run with the traces that were made; whether the batch is confirmed. If
        it is not after `MOST_TRACES`, it is the largest of those whose own traces fit.
    """
    fitting: set[int] = set()
    for _ in range(MOST_TRACES // 2):
        batch = largest_batch(run, engine, memory)
        if batch is None or batch == 0 or batch >= LARGEST_BATCH - 1:
            # Not known, none, or no end in sight.
            return batch, run, batch is not None
        larger = max(batch + 1, batch * 5 // 4)
        for size in (batch, larger):
            if run.traces is not None and not run.traces.traced(size):
                run = replace(run, traces=replace(run.traces, more=(*run.traces.more, trace_at(size))))
        fits = [run.peak(engine, size).device.total <= memory for size in (batch, larger)]
        fitting |= {size for size, does in zip((batch, larger), fits, strict=True) if does}
        if fits == [True, False]:
            return batch, run, True
    return max(fitting, default=0), run, False


def fewest_devices(
    run: Run, engine_on: Callable[[Nodes], EngineFacts | None], devices: int, memory: int
) -> Nodes | None:
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
