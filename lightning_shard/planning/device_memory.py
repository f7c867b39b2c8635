"""Predict a device's memory as its driver shows it: bytes that torch's allocator reserves, and bytes outside of it.

The points of a step (`Point`) give the bytes that an engine holds. The trace gives the module's allocations and frees
in order. Both drive `Allocator` through two steps, because the optimizer makes its state in the first one, between
blocks that backward left. `Allocator` models PyTorch's caching allocator for CUDA after ``c10/core/AllocatorConfig.h``
(sizes) and ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_allocation_size``, ``should_split``,
``get_free_block``, ``try_allocate_expandable_block``) of torch 2.13, with default settings or with
``expandable_segments:True``. It never runs out of memory.
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
SMALL = 1 * MiB  # Blocks up to this size share segments of `SMALL_SEGMENT` with no larger ones (``kSmallSize``).
SMALL_SEGMENT = 2 * MiB
# Size of a segment for blocks below `OWN_SEGMENT` (``large_segment_size``), and step by which expandable ones grow.
LARGE_SEGMENT = 20 * MiB
OWN_SEGMENT = 10 * MiB  # From this size on a block gets a segment of its size, rounded up (``kMinLargeAlloc``).
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
    """The free blocks of one stream, either small or large ones."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # By size, then address.
    begins: dict[int, Block] = field(default_factory=dict)  # The same blocks by first address.
    ends: dict[int, Block] = field(default_factory=dict)  # The same blocks by end address.
    end: int = 0  # End address of the expandable segment, which grows there.

    def add_free(self, block: Block) -> None:
        """Add a block, merged with its free neighbours."""
        for neighbour in (self.begins.get(block.end), self.ends.get(block.address)):
            if neighbour is not None:
                self.remove_free(neighbour)
                block.size += neighbour.size
                block.address = min(block.address, neighbour.address)
        insort(self.free, (block.size, block.address, block))
        self.begins[block.address] = self.ends[block.end] = block

    def remove_free(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.begins[block.address], self.ends[block.end]

    def best_fit(self, size: int) -> Block | None:
        """The smallest free block that is large enough. The end that can grow counts as the largest."""
        index = bisect_left(self.free, (size, 0))
        large = [block for _, _, block in self.free[index : index + 2]]
        return min(large, key=lambda block: block.end == self.end, default=None)


class Allocator:
    """Blocks of one device, in bytes. Streams have names. A stream never gets a block that another one freed."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.reserved = 0  # Bytes of segments. They only grow.
        self.allocated = self.most_allocated = 0  # Bytes of blocks in use, rounded as by torch.
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, size: int, stream: str = "") -> Block:
        size = up_to(max(size, 1), BLOCK)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), Pool(small=small))
        block = pool.best_fit(size) or self._reserve(pool, size)
        pool.remove_free(block)
        left = block.size - size
        if left >= BLOCK if small or self._expandable else left > SMALL:
            block.size = size
            pool.add_free(Block(left, address=block.end, pool=pool))
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.pool.add_free(block)

    def _reserve(self, pool: Pool, size: int) -> Block:
        """Reserve a free block in a new segment, or lengthen the end of the pool's expandable segment."""
        if self._expandable:
            tail = pool.ends.get(pool.end)
            made = up_to(size - (tail.size if tail else 0), SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
            block = Block(made, address=pool.end, pool=pool)
            pool.end += made
        else:
            made = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < OWN_SEGMENT else up_to(size, ROUNDING)
            # Segments are not adjacent, and each new one has a higher address.
            block = Block(made, address=2 * self.reserved, pool=pool)
        self.reserved += made
        pool.add_free(block)
        return block


Range = tuple[int, int]  # Lower and upper bound, in bytes.

# The CUDA context with loaded kernels. Lower bound: kernels are loaded at first use (CUDA_MODULE_LOADING=LAZY, the
# default since CUDA 12.2). Upper bound: all kernels, 0.87 GiB outside of torch's reservation on a Titan RTX (from an
# out-of-memory error in https://huggingface.co/blog/pytorch-fsdp, table 2).
CONTEXT: Range = (450 * 10**6, 930 * 10**6)

# One workspace for each thread that multiplies matrices, in forward and in backward (``aten/src/ATen/cuda``).
# ``CublasHandlePool.cpp``: :4096:2:16:8, or 32 MiB on Hopper and Blackwell. ``CUDABlas.cpp``: 1 MiB for cuBLASLt.
CUBLAS: Range = (2 * 8_519_680, 2 * (32 + 1) * MiB)

_CONNECTION = 12 * MiB
# Buffers of a communicator, per channel and neighbour: 10 MiB for receiving and 2 MiB for sending. The sizes are from
# NCCL's own log (github.com/NVIDIA/nccl/issues/1685), and are sums over the buffers of its three protocols (4 MiB, 4.7
# MiB, 0.5 MiB). Lower bound: two channels in a ring, as over PCIe. Upper bound: 32 channels in rings and trees, as over
# NVSwitch. They do not grow with the number of ranks (github.com/NVIDIA/nccl/issues/864).
NCCL: Range = (2 * _CONNECTION, 2 * 32 * _CONNECTION)


def verdict(needs: Range, memory: int) -> str:
    """Whether ``needs`` fits into ``memory`` bytes of a device. "fits": even its upper bound does."""
    return "fits" if needs[1] <= memory else "may fit" if needs[0] <= memory else "does not fit"


_MOVING = ("gathered", "gradients", "communication")


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on a device at the peak of a step."""

    tensors: int
    overhead: Mapping[str, Range] = field(default_factory=dict)  # Bytes outside of tensors, by purpose.
    # Bytes of `blocks` for each further byte of tensors in a larger batch. None: they grow in proportion.
    growth: float | None = None

    @property
    def blocks(self) -> Range:
        """Bytes of the allocator's blocks outside of tensors."""
        return self.overhead.get(BLOCKS, (0, 0))

    @property
    def bounds(self) -> Range:
        low, high = (sum(each[end] for each in self.overhead.values()) for end in (0, 1))
        return self.tensors + low, self.tensors + high

    def at(self, tensors: int) -> Range:
        """`bounds` if tensors take so many bytes, as with another batch or number of devices."""
        more, (low, high) = tensors - self.tensors, self.bounds
        least, most = (blocks / max(1, self.tensors) for blocks in self.blocks)
        rate = most if more < 0 or self.growth is None else self.growth
        return low + more + round(min(least, rate) * more), high + more + round(rate * more)


BLOCKS = "blocks of torch's allocator"


def device_memory(
    points: Sequence[Point], training: Training, engine: EngineFacts, trace: Trace | None, *, cpu: bool = False
) -> DeviceMemory:
    """The memory of the rank with these points. Without a trace, blocks of the allocator are left out. With ``cpu``,
    tensors alone are counted.
    """
    if cpu:
        return DeviceMemory(tensors=peak(points, cpu=True).held(cpu=True))
    tensors = peak(points).held()
    overhead: dict[str, Range] = {}
    if trace is not None and trace.events:
        both = [replay(points, trace, training, expandable=expandable) for expandable in (True, False)]
        overhead[BLOCKS] = (max(0, min(both) - tensors), max(0, max(both) - tensors))
    if count := engine.communicators:
        overhead[f"NCCL, {count} communicator{'s' * (count > 1)}"] = (count * NCCL[0], count * NCCL[1])
    return DeviceMemory(tensors=tensors, overhead=overhead | {"cuBLAS workspaces": CUBLAS, "CUDA context": CONTEXT})


def replay(points: Sequence[Point], trace: Trace, training: Training, *, expandable: bool) -> int:
    """Bytes that the allocator has reserved after two steps."""
    itemsize = training.policy.compute.itemsize
    # All small parameters, maybe thousands, count as one block.
    full = sorted({size for p in training.model.parameters if (size := p.numel * itemsize) > SMALL}, reverse=True)
    device = _Device(Allocator(expandable=expandable), full)
    made: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for segment, key, size in trace.events:
        made[segment].append((key, size))
    sizes, slots = [p.numel for p in training.model.parameters], len(training.optimizer.slots)
    start, points = [p for p in points if p.name == START], [p for p in points if p.name != START]
    states = points[0].account.device
    for kind in ("parameters", "masters", "buffers", "averages"):
        device.allocate_state(getattr(states, kind), sizes)
    for point in start:
        device.hold_point(point)
    for step in range(2):
        reached = 0
        device.run_events([(key, 0) for key in device.own])  # The last step's loss and batch are freed.
        for point in points:
            if point is points[-1] and not step:
                for _ in range(slots):
                    device.allocate_state(states.optimizer // slots, sizes)
            device.hold_point(point)
            # Temporary tensors of the optimizer's step.
            for block in device.allocate_state(point.account.device.optimizer - states.optimizer, sizes):
                device.allocator.free(block)
            if point.name == trace.segments[reached % len(trace.segments)].name:
                device.run_events(made[reached % len(trace.segments)])
                reached += 1
    return device.allocator.reserved


class _Device:
    """Blocks by purpose: an engine's bytes of a kind, and the module's own storages."""

    def __init__(self, allocator: Allocator, full: Sequence[int]) -> None:
        """``full``: bytes of full parameters in descending order."""
        self.allocator, self.full = allocator, full
        self.held: dict[tuple[str, str], list[Block]] = {}
        self.own: dict[int, Block] = {}

    def allocate_state(self, total: int, sizes: Sequence[int]) -> list[Block]:
        """Allocate ``total`` bytes as one tensor for each parameter, in proportion to the parameters' sizes."""
        whole = max(1, sum(sizes))
        return [self.allocator.allocate(total * size // whole) for size in sizes] if total > 0 else []

    def hold_point(self, point: Point) -> None:
        """Free and allocate blocks until the engine holds the bytes of ``point``."""
        wanted: dict[tuple[str, str], int] = {}
        for kind in _MOVING:
            separate = getattr(point.own_stream, kind)
            wanted |= {(kind, kind): separate, (kind, ""): getattr(point.account.device, kind) - separate}
        missing: dict[tuple[str, str], int] = {}
        for key, size in wanted.items():
            blocks = self.held.setdefault(key, [])
            there = sum(block.size for block in blocks)
            while blocks and there > size + len(blocks) * BLOCK:
                there -= blocks[-1].size
                self.allocator.free(blocks.pop())
            missing[key] = size - there
        for key, size in missing.items():
            # Gathered bytes are one tensor for each parameter, of recurring sizes. Other kinds are buffers.
            for piece in self.full if key[0] == "gathered" else ():
                while size >= piece:
                    self.held[key].append(self.allocator.allocate(piece, key[1]))
                    size -= piece
            if size > 0:
                self.held[key].append(self.allocator.allocate(size, key[1]))

    def run_events(self, events: Iterable[tuple[int, int]]) -> None:
        """Allocate and free the module's own storages. A size of 0 is a free."""
        for key, size in events:
            if (block := self.own.pop(key, None)) is not None:
                self.allocator.free(block)
            if size:
                self.own[key] = self.allocator.allocate(size)
