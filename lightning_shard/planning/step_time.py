"""How long an optimizer step takes: the schedule of an engine, unit by unit, on one device, its links and its host.

What waits for what, read off torch's ``_fsdp_param_group.py`` and DeepSpeed's ``partitioned_param_coordinator.py``: a
unit computes once it is gathered; the next one is gathered meanwhile, from when the last buffer is free; gradients are
reduced behind backward, in turn with the gathers where both are on one communicator, and a step waits for the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_shard.engines.facts import DeepSpeedFacts, EngineFacts
from lightning_shard.memory import KindBytes
from lightning_shard.meters.peaks import Peaks
from lightning_shard.planning.facts import ModelFacts, Training
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.operators import Device, Work
from lightning_shard.planning.predict import collectives, predict
from lightning_shard.planning.traffic import Collective, Nodes

INSIDE, BETWEEN, HOST = "the links inside nodes", "the links between nodes", "the link to the host"
PRODUCTS, MEMORY, LAUNCHES = "compute", "the memory's bandwidth", "the launches of kernels"
CPU_STEP, NVME = "the optimizer on the host", "NVMe"

HBM_REACHED, LINK_REACHED, PCIE_REACHED = 0.85, 0.8, 0.8
"""Of a data sheet's bandwidth: what copies in a device's memory reach, collectives (as nccl-tests print them for nodes
of eight), and pinned copies over PCIe."""
IN_A_STEP = 0.88
"""Of what products reach alone, what they reach in a step, beside collectives and with power shared: fitted on two of
fms-fsdp's published runs (7B and 34B on 128 A100), and judged on others."""
CPU_ADAM, TORCH_ADAM = 4e9, 0.7e9
"""Parameters per second that a node of two processors steps by DeepSpeed's CPU Adam and by torch's (ZeRO-Offload, arXiv
2101.06840, table 4)."""
NVME_SPEED = 12e9
"""Bytes per second that a node's drives read, and write: a few of about 3 GB/s each."""
_BASE, _INSIDE, _BETWEEN = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a ring: for itself, for each step inside a node and between nodes (NCCL's ``src/graph/tuning.cc``)."""


def device_of(peaks: Peaks, peak: float, *, efficiency: float | None = None) -> Device:
    """What a device of the data sheet reaches in products of FLOP/s ``peak``; ``efficiency``: a part of it given."""
    reached = peaks.reached * IN_A_STEP if efficiency is None else efficiency
    memory = 1e12 * (peaks.memory or peaks.half * 3.35 / 989.4)
    return Device(
        products=peak * reached,
        # A large product without tensor cores comes close to its peak.
        single=peak * reached if peak < 1e12 * peaks.half else 0.9e12 * (peaks.tf32 or peaks.single),
        memory=memory * HBM_REACHED,
        attention=peaks.attention,
        processors=peaks.processors,
        host=1e9 * peaks.host * PCIE_REACHED,
    )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """An optimizer step in seconds: what the device does, and what it waits for."""

    parts: Mapping[str, float]  # What is done or waited for, to seconds, one after the other.
    inside: float = 0.0  # Of the links inside nodes, as if they had the step for themselves.
    between: float = 0.0  # Of the links between nodes, likewise.

    @property
    def expected(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What most of the step is spent on."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What carries the bytes of a step; speeds in bytes per second, None: free."""

    device: Device
    nodes: Nodes
    inside: float | None = None  # Of a device to others of its node.
    between: float | None = None  # Of a node to others.


@dataclass(frozen=True, kw_only=True)
class Transfer:
    seconds: float = 0.0
    by: str = INSIDE  # What takes longest of it.
    copies: float = 0.0  # Seconds of the device in which tensors are copied to and from the buffers that are sent.

    def __add__(self, other: Transfer) -> Transfer:
        longer = max(self, other, key=lambda each: each.seconds)
        seconds, copies = self.seconds + other.seconds, self.copies + other.copies
        return Transfer(seconds=seconds, by=longer.by, copies=copies)


def transfer(sent: Collective, rates: Rates) -> Transfer:
    """A collective as a ring: the slower of both kinds of links, and its steps."""
    inside = sent.inside(rates.nodes) / rates.inside if rates.inside else 0.0
    between = sent.between(rates.nodes) / rates.between if rates.between else 0.0
    crossed = sent.nodes(rates.nodes)
    latency = _BASE + _INSIDE * (sent.ranks - crossed) + _BETWEEN * (crossed - 1)
    free = not rates.inside and not rates.between
    seconds = 0.0 if free else max(inside, between) + latency
    # Read and written, once per rank for what is full there.
    copies = 0.0 if sent.what == "gradient shards" else 2 * sent.payload / rates.device.memory
    return Transfer(seconds=seconds, by=BETWEEN if between > inside else INSIDE, copies=copies)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What an engine does beside a unit's operators."""

    forward: Mapping[str, Transfer]  # A unit is gathered ahead of its forward,
    backward: Mapping[str, Transfer]  # ahead of its backward,
    reduce: Mapping[str, Transfer]  # and its gradients are reduced,
    across: Mapping[str, Transfer]  # and then among copies of the model, on a communicator of their own.
    overlaps: bool  # Whether reductions go beside backward.
    at_boundary: bool  # Whether accumulated gradients are reduced in the last micro-batch alone.
    after: tuple[Transfer, ...] = ()  # After backward: the step, and what it sends.


_NAMES = {
    "parameters, forward": "forward",
    "parameters, backward": "backward",
    "gradients": "reduce",
    "gradient shards": "across",
}


def schedule(training: Training, engine: EngineFacts, rates: Rates) -> Schedule:
    """The collectives of each unit by the engine's own arithmetic, and what passes between device and host."""
    found: dict[str, dict[str, Transfer]] = {"forward": {}, "backward": {}, "reduce": {}, "across": {}}
    after: list[Transfer] = []
    memory, total = predict(training, engine).step, max(1, training.model.numel)
    away = memory.host + memory.nvme
    for unit, members in training.model.units.items():
        own = replace(training, model=ModelFacts(parameters=members), micro_batches=1)
        part = own.model.numel / total
        for sent in collectives(own, engine):
            if kind := _NAMES.get(sent.what):
                found[kind][unit] = found[kind].get(unit, Transfer()) + transfer(sent, rates)
            else:
                after.append(transfer(sent, rates))
        host, reduced = rates.device.host, away.gradients
        if away.masters and reduced:  # summed there, in another dtype than they are sent in
            reduced = away.masters // training.policy.master.itemsize * training.policy.compute.itemsize
        for kind, size in (("forward", away.parameters), ("backward", away.parameters), ("reduce", reduced)):
            if size:
                moved = Transfer(seconds=size * part / host, by=HOST)
                found[kind][unit] = found[kind].get(unit, Transfer()) + moved
    zero = isinstance(engine, DeepSpeedFacts)
    return Schedule(
        **found,
        overlaps=not isinstance(engine, DeepSpeedFacts) or engine.overlap_comm,
        at_boundary=engine.stage < 2 if isinstance(engine, DeepSpeedFacts) else engine.reduce_at_boundary,
        after=(
            *after,
            *_step(training, memory.device, memory.host, memory.nvme, rates, by=CPU_ADAM if zero else TORCH_ADAM),
        ),
    )


def _step(
    training: Training, device: KindBytes, host: KindBytes, nvme: KindBytes, rates: Rates, *, by: float
) -> Iterable[Transfer]:
    """The optimizer's step where its state is, and what passes between there and the device for it."""
    master, optimizer = training.policy.master.itemsize, training.optimizer
    if device.optimizer:
        stepped = device.masters or device.parameters
        yield Transfer(seconds=stepped * optimizer.moved / rates.device.memory, by=MEMORY)
    if away := (host + nvme).optimizer:
        slots = sum((slot or training.policy.master).itemsize for slot in optimizer.slots)
        elements = away / max(1, slots or master)
        yield Transfer(seconds=elements * rates.nodes.devices / by, by=CPU_STEP)
        if device.parameters and not host.parameters:
            # The new parameters, in the compute dtype.
            yield Transfer(seconds=elements * training.policy.compute.itemsize / rates.device.host, by=HOST)
    if swapped := nvme.optimizer + nvme.masters:
        yield Transfer(seconds=2 * swapped * rates.nodes.devices / NVME_SPEED, by=NVME)


@dataclass(kw_only=True)
class _Clock:
    """Where device, host and links are in a micro-batch, in seconds."""

    device: float = 0.0
    host: float = 0.0
    wire: float = 0.0  # Of the communicator of gathers and reductions.
    across: float = 0.0  # Of that of the copies of the model.
    spent: dict[str, float] = field(default_factory=dict)

    def spend(self, by: str, seconds: float) -> None:
        if seconds > 0:
            self.spent[by] = self.spent.get(by, 0.0) + seconds
            self.device += seconds

    def wait(self, until: float, by: str) -> None:
        self.spend(by, until - self.device)

    def compute(self, work: Work, device: Device, *, compiled: bool) -> None:
        memory, launches = (work.fused, work.kernels) if compiled else (work.memory, work.operators)
        self.host = max(self.host, self.device - _AHEAD) + launches * device.launch
        self.spend(PRODUCTS, work.products)
        self.spend(MEMORY, memory)
        self.wait(self.host, LAUNCHES)


_AHEAD = 0.05
"""Seconds that the host may be ahead of the device: about a thousand kernels wait in its queue."""


def _micro_batch(
    trace: Trace, work: Sequence[Work], plan: Schedule, device: Device, *, compiled: bool, reduces: bool
) -> dict[str, float]:
    clock, order = _Clock(), trace.order
    ready: dict[tuple[str, str], float] = {}
    done: tuple[str, ...] = ()

    def gather(phase: str, unit: str) -> None:
        if (phase, unit) not in ready:
            sent = (plan.forward if phase == "forward" else plan.backward).get(unit, Transfer())
            clock.wire = ready[phase, unit] = max(clock.wire, clock.device) + sent.seconds if sent.seconds else 0.0
            clock.spend(MEMORY, sent.copies)

    gather("forward", "")
    for segment, own in zip(trace.segments, work, strict=True):
        phase, unit = segment.phase, segment.unit
        table = plan.forward if phase == "forward" else plan.backward
        if unit and unit not in done:
            gather(phase, unit)
            clock.wait(ready[phase, unit], table.get(unit, Transfer()).by)
            beside = order.index(unit) + (1 if phase == "forward" else -1) if unit in order else -1
            if 0 <= beside < len(order):
                gather(phase, order[beside])
        elif not unit:
            clock.wait(ready["forward", ""], plan.forward.get("", Transfer()).by)
            if phase == "backward" and not done and order:
                gather("backward", order[-1])
        clock.compute(own, device, compiled=compiled and bool(unit))
        for name in [name for name in segment.complete if name not in done and reduces]:
            sent = plan.reduce.get(name, Transfer())
            clock.spend(MEMORY, sent.copies)
            clock.wire = max(clock.wire, clock.device) + sent.seconds
            clock.across = max(clock.across, clock.wire) + plan.across.get(name, Transfer()).seconds
            if not plan.overlaps:
                clock.wait(clock.wire, sent.by)
        done = segment.complete or done
    for until, table in ((clock.wire, plan.reduce), (clock.across, plan.across)):
        if reduces:
            clock.wait(until, max(table.values(), key=lambda sent: sent.seconds, default=Transfer()).by)
    return clock.spent


def step_time(
    training: Training, engine: EngineFacts, trace: Trace, rates: Rates, *, compiled: bool = False
) -> StepTime:
    """The step of a rank, of the trace's batch; ``trace`` was made with ``rates``' device."""
    plan, count = schedule(training, engine, rates), training.micro_batches
    last = _micro_batch(trace, trace.work, plan, rates.device, compiled=compiled, reduces=True)
    parts = dict(last)
    if count > 1:
        other = last
        if plan.at_boundary:
            other = _micro_batch(trace, trace.work, plan, rates.device, compiled=compiled, reduces=False)
        for by, seconds in other.items():
            parts[by] = parts.get(by, 0.0) + (count - 1) * seconds
    for sent in plan.after:
        parts[sent.by] = parts.get(sent.by, 0.0) + sent.seconds
    every = collectives(training, engine)
    return StepTime(
        parts=parts,
        inside=sum(c.inside(rates.nodes) for c in every) / rates.inside if rates.inside else 0.0,
        between=sum(c.between(rates.nodes) for c in every) / rates.between if rates.between else 0.0,
    )
