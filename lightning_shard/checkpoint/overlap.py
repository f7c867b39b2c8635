"""Whether boxes of a tensor overlap, without comparing each with each.

torch's own check sweeps along the tensor's longest dim, on which the shards of a tensor that is cut along another one
all begin together: with a thousand ranks it compares a million pairs for each tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence

Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box, by dim."""


def find_overlap(shape: Sequence[int], boxes: Sequence[Cut]) -> tuple[Cut, Cut] | None:
    """Two of the boxes, all inside a tensor of ``shape``, that have an element in common; None if there are none.

    Boxes that are contiguous in the tensor's memory, as those of rows and of flat partitions are, take the time of
    sorting them; others at worst that of comparing those that meet along the dim that is cut most.
    """
    if len(boxes) < 2 or math.prod(shape) == 0:
        return None
    if all(_is_contiguous(shape, box) for box in boxes):
        lines = [((_start(shape, box),), (math.prod(box[1]),)) for box in boxes]
        return _sweep(boxes, lines, 0)
    return _sweep(boxes, boxes, max(range(len(shape)), key=lambda dim: len({offsets[dim] for offsets, _ in boxes})))


def _is_contiguous(shape: Sequence[int], box: Cut) -> bool:
    _, sizes = box
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return tuple(sizes[first + 1 :]) == tuple(shape[first + 1 :])


def _start(shape: Sequence[int], box: Cut) -> int:
    """Where the box begins in the tensor's row-major order."""
    start = 0
    for offset, size in zip(box[0], shape, strict=True):
        start = start * size + offset
    return start


def _sweep(boxes: Sequence[Cut], cuts: Sequence[Cut], dim: int) -> tuple[Cut, Cut] | None:
    """Go along ``dim`` and compare each of ``cuts`` with those that reach as far as its beginning."""
    active: list[tuple[int, int]] = []  # ends with their cuts, those that end first in front
    for number in sorted(range(len(cuts)), key=lambda number: cuts[number][0][dim]):
        offsets, sizes = cuts[number]
        del active[: bisect_right(active, (offsets[dim], len(cuts)))]
        for _, other in active:
            if _meet(cuts[number], cuts[other]):
                return boxes[other], boxes[number]
        insort(active, (offsets[dim] + sizes[dim], number))
    return None


def _meet(one: Cut, other: Cut) -> bool:
    return all(
        begin < other_begin + other_size and other_begin < begin + size
        for begin, size, other_begin, other_size in zip(*one, *other, strict=True)
    )
