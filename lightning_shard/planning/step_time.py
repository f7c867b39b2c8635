"""Predict the time of an optimizer step from an engine's schedule, unit by unit, on one device, its links and its host.

The order follows torch's ``_fsdp_param_group.py`` and DeepSpeed's ``partitioned_param_coordinator.py``. A unit computes
once it is gathered. The next unit is gathered meanwhile, once the last buffer is free. Gradients are reduced during
backward, after earlier gathers on the same communicator. The step waits for the last reduction.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lightning_shard.engines.memory_model import EngineFacts
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.peaks import Peaks
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.model_facts import ModelFacts, Training
from lightning_shard.planning.operators import Device, Work
from lightning_shard.planning.predict import collectives, step_memory
from lightning_shard.planning.traffic import Collective, Nodes

INSIDE, BETWEEN, HOST = "the links inside nodes", "the links between nodes", "the link to the host"
PRODUCTS, MEMORY, LAUNCHES = "compute", "the memory's bandwidth", "the launches of kernels"
SENDING = "kernels that send"
CPU_STEP, NVME = "the optimizer on the host", "NVMe"

HBM_REACHED, LINK_REACHED, PCIE_REACHED = 0.7, 0.8, 0.8
"""Shares of a data sheet's bandwidth that are reached: in a device's memory by kernels of a step (fitted like
`IN_A_STEP`), on links by collectives (as printed by nccl-tests for nodes of eight), and over PCIe by pinned copies."""
IN_A_STEP = 0.87
"""Share of the products' rate alone that they reach in a step, which shares power and caches. Fitted on one half of the
published steps in ``examples/benchmarks/published_tables.py`` and judged by the other half."""
CPU_ADAM, TORCH_ADAM = 4e9, 0.7e9
"""Parameters per second that a node of two processors steps with DeepSpeed's CPU Adam and with torch's (ZeRO-Offload,
arXiv 2101.06840, table 4)."""
NVME_SPEED = 12e9  # Bytes per second that a node's drives read, or write: a few drives of about 3 GB/s each.
_BASE, _INSIDE, _BETWEEN = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a ring: base, each step inside a node, each step between nodes (NCCL's ``src/graph/tuning.cc``)."""


def device_of(peaks: Peaks, peak: float) -> Device:
    """The rates that a device reaches, by its data sheet. ``peak``: FLOP/s of products."""
    reached = peaks.reached * IN_A_STEP
    memory = 1e12 * (peaks.memory or peaks.half * 3.35 / 989.4)
    return Device(
        products=peak * reached,
        # A large product without tensor cores nearly reaches its peak.
        single=peak * reached if peak < 1e12 * peaks.half else 0.9e12 * (peaks.tf32 or peaks.single),
        memory=memory * HBM_REACHED,
        attention=peaks.attention,
        processors=peaks.processors,
        host=1e9 * peaks.host * PCIE_REACHED,
    )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of an optimizer step."""

    parts: Mapping[str, float]  # Seconds of work and of waiting on the device, by resource. Their sum is the step.
    inside: float = 0.0  # Seconds of all traffic inside nodes alone.
    between: float = 0.0  # Seconds of all traffic between nodes alone.

    @property
    def expected(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The machines of a step, with link speeds in bytes per second. None: no cost."""

    nodes: Nodes
    device: Device
    inside: float | None = None  # From a device to others in its node.
    between: float | None = None  # From a node to others.


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The time of collectives or copies."""

    seconds: float = 0.0
    by: str = INSIDE  # The resource that takes the longest.
    copies: float = 0.0  # Seconds of the device's memory, for copies to and from the buffers that are sent.
    kernels: float = 0.0  # Seconds of the device's processors, for kernels that send while others compute.

    def __add__(self, other: "Transfer") -> "Transfer":
        longer = max(self, other, key=lambda each: each.seconds)
        seconds, copies = self.seconds + other.seconds, self.copies + other.copies
        return Transfer(seconds=seconds, by=longer.by, copies=copies, kernels=self.kernels + other.kernels)


def transfer(sent: Collective, rates: Rates) -> Transfer:
    """The time of a collective as a ring, by the slower kind of links and the latency of its steps."""
    inside = sent.inside(rates.nodes) / rates.inside if rates.inside else 0.0
    between = sent.between(rates.nodes) / rates.between if rates.between else 0.0
    crossed = sent.nodes(rates.nodes)
    latency = _BASE + _INSIDE * (sent.ranks - crossed) + _BETWEEN * (crossed - 1)
    free = not rates.inside and not rates.between
    seconds, taken = (0.0, 0.0) if free else (max(inside, between) + latency, inside + latency)
    # Full tensors are read and written once per rank.
    copies = 0.0 if sent.what == "gradient shards" else 2 * sent.payload / rates.device.memory
    by = BETWEEN if between > inside else INSIDE
    return Transfer(seconds=seconds, by=by, copies=copies, kernels=taken * rates.device.shared)


# An engine's transfers by unit: gathers before its "forward" and its "backward", the reduction of its gradients
# ("reduce"), and then the reduction among copies of the model ("across") on a communicator of its own.
Schedule = Mapping[str, Mapping[str, Transfer]]
_PARTS = {
    "parameters, forward": "forward",
    "parameters, backward": "backward",
    "gradients": "reduce",
    "gradient shards": "across",
}


def schedule(training: Training, engine: EngineFacts, rates: Rates) -> tuple[Schedule, list[Transfer]]:
    """The transfers of each unit, by the engine's collectives and its copies to the host, and those after backward."""
    found: dict[str, dict[str, Transfer]] = {part: defaultdict(Transfer) for part in _PARTS.values()}
    after: list[Transfer] = []
    memory = step_memory(training, engine).step
    away = memory.host + memory.nvme
    reduced = away.gradients
    if away.masters and reduced:  # Gradients are summed on the host in another dtype than they are sent in.
        reduced = away.masters // training.policy.master.itemsize * training.policy.compute.itemsize
    moved = {"forward": away.parameters, "backward": away.parameters, "reduce": reduced}
    for unit, members in training.model.units.items():
        own = replace(training, model=ModelFacts(parameters=members), micro_batches=1)
        for sent in collectives(own, engine):
            if part := _PARTS.get(sent.what):
                found[part][unit] += transfer(sent, rates)
            else:
                after.append(transfer(sent, rates))
        for part, size in moved.items():
            if size:
                seconds = size * own.model.numel / max(1, training.model.numel) / rates.device.host
                found[part][unit] += Transfer(seconds=seconds, by=HOST)
    speed = CPU_ADAM if engine.own_cpu_optimizer else TORCH_ADAM
    return found, [*after, *_optimizer_step(training, memory, rates, speed)]


def _optimizer_step(training: Training, memory: MemoryAccount, rates: Rates, cpu_speed: float) -> Iterable[Transfer]:
    """The optimizer's step in the memory of its state, and the copies between there and the device."""
    master, optimizer, device = training.policy.master.itemsize, training.optimizer, memory.device
    if device.optimizer:
        stepped = device.masters or device.parameters * training.stepped_share
        yield Transfer(seconds=stepped * optimizer.moved / rates.device.memory, by=MEMORY)
    if away := (memory.host + memory.nvme).optimizer:
        slots = sum((slot or training.policy.master).itemsize for slot in optimizer.slots)
        elements = away / max(1, slots or master)
        yield Transfer(seconds=elements * rates.nodes.devices / cpu_speed, by=CPU_STEP)
        if device.parameters and not memory.host.parameters:
            # The new parameters, in the compute dtype.
            yield Transfer(seconds=elements * training.policy.compute.itemsize / rates.device.host, by=HOST)
    if swapped := memory.nvme.optimizer + memory.nvme.masters:
        yield Transfer(seconds=2 * swapped * rates.nodes.devices / NVME_SPEED, by=NVME)


@dataclass(kw_only=True)
class _Clock:
    """The times at which the device, the host and two communicators are free, and the device's time by resource."""

    device: float = 0.0
    host: float = 0.0
    wire: float = 0.0  # The communicator of gathers and reductions.
    across: float = 0.0  # The communicator among copies of the model.
    spent: dict[str, float] = field(default_factory=dict)

    def spend(self, by: str, seconds: float) -> None:
        if seconds > 0:
            self.spent[by] = self.spent.get(by, 0.0) + seconds
            self.device += seconds

    def spend_on_sending(self, sent: Transfer) -> None:
        self.spend(MEMORY, sent.copies)
        self.spend(SENDING, sent.kernels)

    def wait_until(self, until: float, by: str) -> None:
        self.spend(by, until - self.device)

    def compute(self, work: Work, device: Device, *, compiled: bool) -> None:
        memory, launches = (work.fused, work.kernels) if compiled else (work.memory, work.operators)
        self.host = max(self.host, self.device - _AHEAD) + launches * device.launch
        self.spend(PRODUCTS, work.products)
        self.spend(MEMORY, memory)
        self.wait_until(self.host, LAUNCHES)


_AHEAD = 0.05  # Seconds that the host may be ahead of the device, whose queue takes about a thousand kernels.


def _micro_batch(
    trace: Trace, plan: Schedule, engine: EngineFacts, device: Device, *, compiled: bool, reduces: bool
) -> dict[str, float]:
    clock, order = _Clock(), trace.order
    ready: dict[tuple[str, str], float] = {}
    done: tuple[str, ...] = ()
    offloaded, copied = 0, 0.0

    def gather(phase: str, unit: str) -> None:
        if (phase, unit) not in ready:
            sent = plan[phase][unit]
            clock.wire = ready[phase, unit] = max(clock.wire, clock.device) + sent.seconds if sent.seconds else 0.0
            clock.spend_on_sending(sent)

    gather("forward", "")
    for segment, own in zip(trace.segments, trace.work, strict=True):
        phase, unit = segment.phase, segment.unit
        if unit and unit not in done:
            gather(phase, unit)
            clock.wait_until(ready[phase, unit], plan[phase][unit].by)
            following = order.index(unit) + (1 if phase == "forward" else -1) if unit in order else -1
            if 0 <= following < len(order):
                gather(phase, order[following])
        elif not unit:
            clock.wait_until(ready["forward", ""], plan["forward"][""].by)
            if phase == "backward" and not done and order:
                gather("backward", order[-1])
        if moved := abs(segment.offloaded - offloaded):
            # Inputs of recomputed units are copied to or from the host during a unit. The next unit waits for them.
            clock.wait_until(copied, HOST)
            offloaded, copied = segment.offloaded, clock.device + moved / device.host
        clock.compute(own, device, compiled=compiled and bool(unit))
        for name in [name for name in segment.complete if name not in done and reduces]:
            sent = plan["reduce"][name]
            clock.spend_on_sending(sent)
            clock.wire = max(clock.wire, clock.device) + sent.seconds
            clock.across = max(clock.across, clock.wire) + plan["across"][name].seconds
            if not engine.overlaps:
                clock.wait_until(clock.wire, sent.by)
        done = segment.complete or done
    for until, part in ((clock.wire, "reduce"), (clock.across, "across")) if reduces else ():
        clock.wait_until(until, max(plan[part].values(), key=lambda sent: sent.seconds, default=Transfer()).by)
    return clock.spent


def step_time(training: Training, engine: EngineFacts, trace: Trace, rates: Rates, compiled: bool = False) -> StepTime:
    """The time of a rank's step with the trace's batch. ``trace`` has to be made with the device of ``rates``."""
    plan, after = schedule(training, engine, rates)
    parts: dict[str, float] = defaultdict(float)
    for count, reduces in ((1, True), (training.micro_batches - 1, not engine.reduce_at_boundary)):
        own = _micro_batch(trace, plan, engine, rates.device, compiled=compiled, reduces=reduces) if count else {}
        for by, seconds in own.items():
            parts[by] += count * seconds
    for sent in after:
        parts[sent.by] += sent.seconds
    every = collectives(training, engine)
    return StepTime(
        parts=dict(parts),
        inside=sum(c.inside(rates.nodes) for c in every) / rates.inside if rates.inside else 0.0,
        between=sum(c.between(rates.nodes) for c in every) / rates.between if rates.between else 0.0,
    )
