"""What a profiler's events tell of communication."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

# Kernels of NCCL and RCCL on devices ("ncclDevKernel_AllGather_RING_LL"); on the host the spans of gloo's collectives
# ("gloo:all_reduce"), from when they are started to when they are done.
_COMMUNICATION = re.compile(r"^(nccl|rccl|gloo:)", re.IGNORECASE)

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Shares of the traced time on one rank, between 0 and 1."""

    share: float  # In which some collective ran.
    # In which a collective ran and no other kernel; None on a CPU, where spans tell of no waiting.
    exposed: float | None


def communication(events: Iterable[Any]) -> Communication | None:
    """What part of the traced time is communication; None: nothing was traced.

    Args:
        events: from ``torch.profiler.profile.events()``.
    """
    found = list(events)
    kernels = [event for event in found if event.device_type != DeviceType.CPU]
    looked_at = kernels or found
    talking = _union(_span(e) for e in looked_at if _COMMUNICATION.match(e.name))
    spans = [_span(event) for event in found]
    total = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    if total <= 0:
        return None
    exposed = None
    if kernels:
        computing = _union(_span(e) for e in kernels if not _COMMUNICATION.match(e.name))
        exposed = (_length(_union([*talking, *computing])) - _length(computing)) / total
    return Communication(share=_length(talking) / total, exposed=exposed)


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _union(spans: Iterable[Span]) -> list[Span]:
    """Spans that do not overlap, of the same points."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
