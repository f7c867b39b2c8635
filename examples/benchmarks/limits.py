"""The largest of something that fits into a given memory, found by runs that really take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from examples.benchmarks.processes import PeakMemory, Place


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run that fitted."""

    size: int
    """The size that was tried."""
    peak: int
    """Bytes of the rank that needed most."""
    seconds: float
    """Seconds per step, or the run's own measure."""
    other: Any = None
    """Its other measurements."""


class MemoryLimit:
    """A limit on the memory that a process takes in addition to its present memory.

    On CUDA the allocator holds it, and a run that does not fit ends with torch's out-of-memory error. On CPUs
    nothing ends a process at so many bytes of resident memory: its peak is compared with the limit, as often as
    `check` is called.
    """

    def __init__(self, place: Place, limit: int) -> None:
        """Hold ``limit`` bytes."""
        self._limit = limit
        if place.device.type == "cuda":
            total = torch.cuda.get_device_properties(place.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), place.device)
        self._memory = PeakMemory(place)

    def check(self) -> int:
        """The peak of the rank that needs most. All ranks call it.

        Raises:
            MemoryError: on all ranks, if one is above the limit.
        """
        peaks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, self._memory.bytes())
        if max(peaks) > self._limit:
            raise MemoryError(f"{max(peaks)} bytes")
        return max(peaks)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a run ended for the limit, and for nothing else."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def largest(
    attempt: Callable[[int], Trial | None], *, most: int, resolution: int = 16, start: int = 1
) -> tuple[Trial | None, int]:
    """The largest size for which ``attempt`` gives a trial, and the number of trials. Sizes begin at 1.

    Doubled until one does not fit, or halved until one does, then halved between, until the rest is below
    1 / ``resolution`` of the size.

    Args:
        attempt: a trial, or None if the size does not fit. Sizes below one that fits are taken to fit.
        most: no larger size is tried.
        resolution: see above.
        start: the size that is tried first: the nearer, the fewer trials.
    """
    best: Trial | None = None
    low, high, tried = 0, most + 1, 0
    while high - low > max(1, low // resolution):
        if tried == 0:
            size = max(1, min(start, most))
        elif high > most:
            size = min(2 * low, most)
        else:
            size = (low + high) // 2
        tried += 1
        trial = attempt(size)
        if trial is None:
            high = size
        else:
            best, low = trial, size
    return best, tried
