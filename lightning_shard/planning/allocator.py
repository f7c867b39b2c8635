"""A model of PyTorch's caching allocator for CUDA: what it reserves for given allocations and frees, in their order.

Sources: ``c10/core/AllocatorConfig.h`` (the sizes), ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``,
``get_allocation_size``, ``should_split``, ``get_free_block``, ``try_allocate_expandable_block``) of torch 2.11 to 2.13
with default settings, or with ``expandable_segments:True``. Out of memory is not modelled: nothing is given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MiB = 2**20
BLOCK = 512
"""All sizes are multiples of it (``kMinBlockSize``)."""

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
    """A part of a segment; its neighbours are the parts below and above it."""

    size: int
    address: int
    pool: Pool
    below: Block | None = None
    above: Block | None = None
    free: bool = False


@dataclass(eq=False)
class Pool:
    """The free blocks of one stream, small or large ones."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # Size, address: the order of a search.
    tail: Block | None = None  # The end of an expandable segment, which grows.

    def put(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def best(self, size: int) -> Block | None:
        """The smallest free block that is large enough; the end that can grow counts as the largest of all."""
        index = bisect_left(self.free, (size, 0))
        found = next((block for _, _, block in self.free[index : index + 2] if block is not self.tail), None)
        return found or (self.free[index][2] if index < len(self.free) else None)


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
        block = pool.best(size)
        if block is None:
            block = self._grown(pool, size) if self._expandable else self._segment(pool, size)
        else:
            pool.take(block)
        left = block.size - size
        if left >= BLOCK if small or self._expandable else left > SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Its neighbours that are free become one with it."""
        self.allocated -= block.size
        if (above := block.above) is not None and above.free:
            block.pool.take(above)
            self._merge(block, above)
        if (below := block.below) is not None and below.free:
            block.pool.take(below)
            self._merge(below, block)
            block = below
        block.pool.put(block)

    def _segment(self, pool: Pool, size: int) -> Block:
        made = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < OWN_SEGMENT else up_to(size, ROUNDING)
        self.reserved += made
        # Segments lie apart, so that addresses rise with every one.
        return Block(made, address=self.reserved - made, pool=pool)

    def _grown(self, pool: Pool, size: int) -> Block:
        """The end of the pool's one segment, which was lengthened until it has room."""
        tail = pool.tail
        room = tail.size if tail is not None and tail.free else 0
        added = up_to(size - room, SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
        self.reserved += added
        if tail is not None and room:
            pool.take(tail)
            tail.size += added
            return tail
        address = tail.address + tail.size if tail is not None else 0
        pool.tail = block = Block(added, address=address, pool=pool, below=tail)
        if tail is not None:
            tail.above = block
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, address=block.address + size, pool=block.pool, below=block, above=block.above)
        if rest.above is not None:
            rest.above.below = rest
        block.size, block.above = size, rest
        if block.pool.tail is block:
            block.pool.tail = rest
        block.pool.put(rest)

    def _merge(self, lower: Block, upper: Block) -> None:
        lower.size += upper.size
        lower.above = upper.above
        if upper.above is not None:
            upper.above.below = lower
        if lower.pool.tail is upper:
            lower.pool.tail = lower
