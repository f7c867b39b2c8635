"""A device's memory as its driver would show it: what torch's allocator reserves, and what lies outside of it.

The parts of a step (`Point`) say what an engine holds; the trace what its module allocates and frees, in order. Both
drive `Allocator` through two steps: the optimizer makes its state in the first, between blocks that backward left. It
is a model of PyTorch's caching allocator for CUDA, after ``c10/core/AllocatorConfig.h`` (the sizes) and
``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_allocation_size``, ``should_split``, ``get_free_block``,
``try_allocate_expandable_block``) of torch 2.13 with default settings, or with ``expandable_segments:True``,
without out of memory.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_shard.engines.memory_model import EngineFacts
from lightning_shard.planning.memory_trace import Trace
from lightning_shard.planning.model_facts import Training
from lightning_shard.planning.step_memory import START, Point, peak

MiB = 2**20
BLOCK = 512  # All sizes are multiples of it (``kMinBlockSize``).

SMALL = 1 * MiB
"""What is no larger comes from segments of `SMALL_SEGMENT`, and shares none with what is (``kSmallSize``)."""

SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
"""What a segment has for sizes below `OWN_SEGMENT` (``large_segment_size``), and by what expandable ones grow."""

OWN_SEGMENT = 10 * MiB
"""From this size on a segment is as large as what it is made for, in whole `ROUNDING` (``kMinLargeAlloc``)."""

ROUNDING = 2 * MiB


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(eq=False)
class Block:
    size: int
    address: int
    pool: "Pool"

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(eq=False)
class Pool:
    """The free blocks of one stream, small or large ones."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # Size, address: the order of a search.
    begins: dict[int, Block] = field(default_factory=dict)  # The same by where they begin, and by where they end.
    ends: dict[int, Block] = field(default_factory=dict)
    end: int = 0  # Of an expandable segment, which grows there.

    def put(self, block: Block) -> None:
        """Its neighbours that are free become one with it."""
        for neighbour in (self.begins.get(block.end), self.ends.get(block.address)):
            if neighbour is not None:
                self.take(neighbour)
                block.size += neighbour.size
                block.address = min(block.address, neighbour.address)
        insort(self.free, (block.size, block.address, block))
        self.begins[block.address] = self.ends[block.end] = block

    def take(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.begins[block.address], self.ends[block.end]

    def best(self, size: int) -> Block | None:
        """The smallest free block that is large enough; the end that can grow counts as the largest of all."""
        index = bisect_left(self.free, (size, 0))
        large = [block for _, _, block in self.free[index : index + 2]]
        return min(large, key=lambda block: block.end == self.end, default=None)


class Allocator:
    """Blocks of one device. Sizes are bytes; streams are named, and what one has freed no other gets."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.reserved = 0  # Bytes of segments; they only grow.
        self.allocated = self.most_allocated = 0  # Bytes of blocks in use, rounded as the allocator does.
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, size: int, stream: str = "") -> Block:
        size = up_to(max(size, 1), BLOCK)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), Pool(small=small))
        block = pool.best(size) or self._reserve(pool, size)
        pool.take(block)
        left = block.size - size
        if left >= BLOCK if small or self._expandable else left > SMALL:
            block.size = size
            pool.put(Block(left, address=block.end, pool=pool))
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.pool.put(block)

    def _reserve(self, pool: Pool, size: int) -> Block:
        """A free block of a new segment; or the end of the pool's one segment, lengthened until it has room."""
        if self._expandable:
            tail = pool.ends.get(pool.end)
            made = up_to(size - (tail.size if tail else 0), SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
            block = Block(made, address=pool.end, pool=pool)
            pool.end += made
        else:
            made = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < OWN_SEGMENT else up_to(size, ROUNDING)
            # Segments do not touch, and addresses rise with every one.
            block = Block(made, address=2 * self.reserved, pool=pool)
        self.reserved += made
        pool.put(block)
        return block


Range = tuple[int, int]  # The least and the most, in bytes.

# The CUDA context with the kernels that are loaded. Least: where kernels are loaded when they are first used
# (CUDA_MODULE_LOADING=LAZY, the default since CUDA 12.2); most: all of them, 0.87 GiB beside what torch had reserved of
# a Titan RTX (the message of an out-of-memory error in https://huggingface.co/blog/pytorch-fsdp, table 2).
CONTEXT: Range = (450 * 10**6, 930 * 10**6)

# A workspace for each thread that multiplies matrices, forward's and backward's (``aten/src/ATen/cuda``).
# ``CublasHandlePool.cpp``: :4096:2:16:8, or 32 MiB on Hopper and Blackwell; ``CUDABlas.cpp``: 1 MiB for cuBLASLt.
CUBLAS: Range = (2 * 8_519_680, 2 * (32 + 1) * MiB)

_CONNECTION = 12 * MiB
# Buffers of a communicator: 10 MiB to receive in and 2 MiB to send from, for each channel and neighbour. Sizes are
# those of NCCL's own log (github.com/NVIDIA/nccl/issues/1685), and add up from the buffers of its three protocols (4
# MiB, 4.7 MiB, 0.5 MiB); least: two channels in a ring, as over PCIe; most: 32 channels, as over NVSwitch, in rings and
# trees. They do not grow with the number of ranks (issue 864).
NCCL: Range = (2 * _CONNECTION, 2 * 32 * _CONNECTION)


def verdict(needs: Range, memory: int) -> str:
    """Whether ``memory`` bytes of a device are enough for what needs so much: "fits" is said of the most."""
    return "fits" if needs[1] <= memory else "may fit" if needs[0] <= memory else "does not fit"


_MOVING = ("gathered", "gradients", "communication")


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a device holds at the peak of a step, in bytes."""

    tensors: int
    beside: Mapping[str, Range] = field(default_factory=dict)  # By what it is for.
    # Of the allocator's blocks, with each byte of tensors that a larger batch needs; None: they grow in proportion.
    growth: float | None = None

    @property
    def blocks(self) -> Range:
        """Bytes of the allocator's blocks that are in no tensor."""
        return self.beside.get(BLOCKS, (0, 0))

    @property
    def ends(self) -> Range:
        """All of it, at least and at most."""
        low, high = (sum(each[end] for each in self.beside.values()) for end in (0, 1))
        return self.tensors + low, self.tensors + high

    def at(self, tensors: int) -> Range:
        """`ends` where tensors take so many bytes, as under another batch or number of devices."""
        more, (low, high) = tensors - self.tensors, self.ends
        least, most = (blocks / max(1, self.tensors) for blocks in self.blocks)
        rate = most if more < 0 or self.growth is None else self.growth
        return low + more + round(min(least, rate) * more), high + more + round(rate * more)


BLOCKS = "blocks of torch's allocator"


def device_memory(
    points: Sequence[Point], training: Training, engine: EngineFacts, trace: Trace | None, *, cpu: bool = False
) -> DeviceMemory:
    """Of the rank that has these points; without a trace the allocator's blocks are unknown; ``cpu``: tensors alone."""
    if cpu:
        return DeviceMemory(tensors=peak(points, cpu=True).held(cpu=True))
    tensors = peak(points).held()
    beside: dict[str, Range] = {}
    if trace is not None and trace.events:
        both = [replay(points, trace, training, expandable=expandable) for expandable in (True, False)]
        beside[BLOCKS] = (max(0, min(both) - tensors), max(0, max(both) - tensors))
    if count := engine.communicators:
        beside[f"NCCL, {count} communicator{'s' * (count > 1)}"] = (count * NCCL[0], count * NCCL[1])
    return DeviceMemory(tensors=tensors, beside=beside | {"cuBLAS workspaces": CUBLAS, "CUDA context": CONTEXT})


def replay(points: Sequence[Point], trace: Trace, training: Training, *, expandable: bool) -> int:
    """Bytes that the allocator has reserved after two steps."""
    itemsize = training.policy.compute.itemsize
    # Small ones, of which there may be thousands, are taken for one.
    full = sorted({size for p in training.model.parameters if (size := p.numel * itemsize) > SMALL}, reverse=True)
    device = _Device(Allocator(expandable=expandable), full)
    made: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for segment, key, size in trace.events:
        made[segment].append((key, size))
    sizes, slots = [p.numel for p in training.model.parameters], len(training.optimizer.slots)
    start, points = [p for p in points if p.name == START], [p for p in points if p.name != START]
    states = points[0].account.device
    for kind in ("parameters", "masters", "buffers", "averages"):
        device.state(getattr(states, kind), sizes)
    for point in start:
        device.hold(point)
    for step in range(2):
        reached = 0
        device.run([(key, 0) for key in device.own])  # What is left of a step, its loss and its batch, goes.
        for point in points:
            if point is points[-1] and not step:
                for _ in range(slots):
                    device.state(states.optimizer // slots, sizes)
            device.hold(point)
            # What the optimizer has for the duration of its step.
            for block in device.state(point.account.device.optimizer - states.optimizer, sizes):
                device.allocator.free(block)
            if point.name == trace.segments[reached % len(trace.segments)].name:
                device.run(made[reached % len(trace.segments)])
                reached += 1
    return device.allocator.reserved


class _Device:
    """Blocks by what they are for: an engine's bytes of a kind, and the module's own storages."""

    def __init__(self, allocator: Allocator, full: Sequence[int]) -> None:
        """``full``: bytes of full parameters, from the largest to the smallest."""
        self.allocator, self.full = allocator, full
        self.held: dict[tuple[str, str], list[Block]] = {}
        self.own: dict[int, Block] = {}

    def state(self, total: int, sizes: Sequence[int]) -> list[Block]:
        """One tensor for each parameter, whose sizes are in the ratio of theirs."""
        whole = max(1, sum(sizes))
        return [self.allocator.allocate(total * size // whole) for size in sizes] if total > 0 else []

    def hold(self, point: Point) -> None:
        """The engine frees what it holds no more, and allocates what it holds now."""
        wanted: dict[tuple[str, str], int] = {}
        for kind in _MOVING:
            apart = getattr(point.apart, kind)
            wanted |= {(kind, kind): apart, (kind, ""): getattr(point.account.device, kind) - apart}
        missing: dict[tuple[str, str], int] = {}
        for key, size in wanted.items():
            blocks = self.held.setdefault(key, [])
            there = sum(block.size for block in blocks)
            while blocks and there > size + len(blocks) * BLOCK:
                there -= blocks[-1].size
                self.allocator.free(blocks.pop())
            missing[key] = size - there
        for key, size in missing.items():
            # What is gathered is one tensor for each parameter, of sizes that come again; other kinds are buffers.
            for piece in self.full if key[0] == "gathered" else ():
                while size >= piece:
                    self.held[key].append(self.allocator.allocate(piece, key[1]))
                    size -= piece
            if size > 0:
                self.held[key].append(self.allocator.allocate(size, key[1]))

    def run(self, events: Iterable[tuple[int, int]]) -> None:
        """The module allocates and frees; a size of 0 is a free."""
        for key, size in events:
            if (block := self.own.pop(key, None)) is not None:
                self.allocator.free(block)
            if size:
                self.own[key] = self.allocator.allocate(size)
