"""How long an optimizer step takes: the schedule of an engine, unit by unit, on one device, its links and its host.

What waits for what, read off torch's ``_fsdp_param_group.py`` and DeepSpeed's ``partitioned_param_coordinator.py``: a
unit computes once it is gathered; the next one is gathered meanwhile, from when the last buffer is free; gradients are
reduced behind backward, in turn with the gathers where both are on one communicator, and a step waits for the last.
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
"""Of a data sheet's bandwidth: what kernels of a step reach in a device's memory (fitted as `IN_A_STEP`), collectives
(as nccl-tests print them for nodes of eight), and pinned copies over PCIe."""
IN_A_STEP = 0.87
"""Of what products reach alone, what they reach in a step, with power and caches shared: fitted on one half of the
steps that others have published (``examples/benchmarks/published_tables.py``), and judged by the other."""
CPU_ADAM, TORCH_ADAM = 4e9, 0.7e9
"""Parameters per second that a node of two processors steps by DeepSpeed's CPU Adam and by torch's (ZeRO-Offload, arXiv
2101.06840, table 4)."""
NVME_SPEED = 12e9  # Bytes per second that a node's drives read, and write: a few of about 3 GB/s each.
_BASE, _INSIDE, _BETWEEN = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a ring: for itself, for each step inside a node and between nodes (NCCL's ``src/graph/tuning.cc``)."""


def device_of(peaks: Peaks, peak: float) -> Device:
    """What a device of the data sheet reaches in products of FLOP/s ``peak``."""
    reached = peaks.reached * IN_A_STEP
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
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What computes a step and carries its bytes; speeds in bytes per second, None: free."""

    nodes: Nodes
    device: Device
    inside: float | None = None  # Of a device to others of its node.
    between: float | None = None  # Of a node to others.


@dataclass(frozen=True, kw_only=True)
class Transfer:
    seconds: float = 0.0
    by: str = INSIDE  # What takes longest of it.
    copies: float = 0.0  # Seconds of the device's memory: copies to and from what is sent.
    kernels: float = 0.0  # Seconds of its processors: kernels that send beside others.

    def __add__(self, other: "Transfer") -> "Transfer":
        longer = max(self, other, key=lambda each: each.seconds)
        seconds, copies = self.seconds + other.seconds, self.copies + other.copies
        return Transfer(seconds=seconds, by=longer.by, copies=copies, kernels=self.kernels + other.kernels)


def transfer(sent: Collective, rates: Rates) -> Transfer:
    """A collective as a ring: the slower of both kinds of links, and its steps."""
    inside = sent.inside(rates.nodes) / rates.inside if rates.inside else 0.0
    between = sent.between(rates.nodes) / rates.between if rates.between else 0.0
    crossed = sent.nodes(rates.nodes)
    latency = _BASE + _INSIDE * (sent.ranks - crossed) + _BETWEEN * (crossed - 1)
    free = not rates.inside and not rates.between
    seconds, taken = (0.0, 0.0) if free else (max(inside, between) + latency, inside + latency)
    # Read and written, once per rank for what is full there.
    copies = 0.0 if sent.what == "gradient shards" else 2 * sent.payload / rates.device.memory
    by = BETWEEN if between > inside else INSIDE
    return Transfer(seconds=seconds, by=by, copies=copies, kernels=taken * rates.device.shared)


# What an engine does beside a unit's operators, by unit. It is gathered ahead of its "forward" and of its "backward",
# its gradients are reduced ("reduce"), and then ("across") among copies of the model, on a communicator of their own.
Schedule = Mapping[str, Mapping[str, Transfer]]
_PARTS = {
    "parameters, forward": "forward",
    "parameters, backward": "backward",
    "gradients": "reduce",
    "gradient shards": "across",
}


def schedule(training: Training, engine: EngineFacts, rates: Rates) -> tuple[Schedule, list[Transfer]]:
    """The collectives of each unit by the engine's arithmetic and copies between device and host; then the step's."""
    found: dict[str, dict[str, Transfer]] = {part: defaultdict(Transfer) for part in _PARTS.values()}
    after: list[Transfer] = []
    memory = step_memory(training, engine).step
    away = memory.host + memory.nvme
    reduced = away.gradients
    if away.masters and reduced:  # summed there, in another dtype than they are sent in
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
    return found, [*after, *_step(training, memory, rates, by=CPU_ADAM if engine.own_cpu_optimizer else TORCH_ADAM)]


def _step(training: Training, memory: MemoryAccount, rates: Rates, *, by: float) -> Iterable[Transfer]:
    """The optimizer's step where its state is, and what passes between there and the device for it."""
    master, optimizer, device = training.policy.master.itemsize, training.optimizer, memory.device
    if device.optimizer:
        stepped = device.masters or device.parameters * training.stepped_share
        yield Transfer(seconds=stepped * optimizer.moved / rates.device.memory, by=MEMORY)
    if away := (memory.host + memory.nvme).optimizer:
        slots = sum((slot or training.policy.master).itemsize for slot in optimizer.slots)
        elements = away / max(1, slots or master)
        yield Transfer(seconds=elements * rates.nodes.devices / by, by=CPU_STEP)
        if device.parameters and not memory.host.parameters:
            # The new parameters, in the compute dtype.
            yield Transfer(seconds=elements * training.policy.compute.itemsize / rates.device.host, by=HOST)
    if swapped := memory.nvme.optimizer + memory.nvme.masters:
        yield Transfer(seconds=2 * swapped * rates.nodes.devices / NVME_SPEED, by=NVME)


@dataclass(kw_only=True)
class _Clock:
    device: float = 0.0
    host: float = 0.0
    wire: float = 0.0  # Of the communicator of gathers and reductions.
    across: float = 0.0  # Of that of the copies of the model.
    spent: dict[str, float] = field(default_factory=dict)

    def spend(self, by: str, seconds: float) -> None:
        if seconds > 0:
            self.spent[by] = self.spent.get(by, 0.0) + seconds
            self.device += seconds

    def beside(self, sent: Transfer) -> None:
        self.spend(MEMORY, sent.copies)
        self.spend(SENDING, sent.kernels)

    def wait(self, until: float, by: str) -> None:
        self.spend(by, until - self.device)

    def compute(self, work: Work, device: Device, *, compiled: bool) -> None:
        memory, launches = (work.fused, work.kernels) if compiled else (work.memory, work.operators)
        self.host = max(self.host, self.device - _AHEAD) + launches * device.launch
        self.spend(PRODUCTS, work.products)
        self.spend(MEMORY, memory)
        self.wait(self.host, LAUNCHES)


_AHEAD = 0.05  # Seconds that the host may be ahead of the device: about a thousand kernels wait in its queue.


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
            clock.beside(sent)

    gather("forward", "")
    for segment, own in zip(trace.segments, trace.work, strict=True):
        phase, unit = segment.phase, segment.unit
        if unit and unit not in done:
            gather(phase, unit)
            clock.wait(ready[phase, unit], plan[phase][unit].by)
            beside = order.index(unit) + (1 if phase == "forward" else -1) if unit in order else -1
            if 0 <= beside < len(order):
                gather(phase, order[beside])
        elif not unit:
            clock.wait(ready["forward", ""], plan["forward"][""].by)
            if phase == "backward" and not done and order:
                gather("backward", order[-1])
        if moved := abs(segment.offloaded - offloaded):
            # Inputs of recomputed units pass to the host and back while a unit computes; the next one waits for them.
            clock.wait(copied, HOST)
            offloaded, copied = segment.offloaded, clock.device + moved / device.host
        clock.compute(own, device, compiled=compiled and bool(unit))
        for name in [name for name in segment.complete if name not in done and reduces]:
            sent = plan["reduce"][name]
            clock.beside(sent)
            clock.wire = max(clock.wire, clock.device) + sent.seconds
            clock.across = max(clock.across, clock.wire) + plan["across"][name].seconds
            if not engine.overlaps:
                clock.wait(clock.wire, sent.by)
        done = segment.complete or done
    for until, part in ((clock.wire, "reduce"), (clock.across, "across")) if reduces else ():
        clock.wait(until, max(plan[part].values(), key=lambda sent: sent.seconds, default=Transfer()).by)
    return clock.spent


def step_time(training: Training, engine: EngineFacts, trace: Trace, rates: Rates, compiled: bool = False) -> StepTime:
    """The step of a rank, of the trace's batch; ``trace`` was made with ``rates``' device."""
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
