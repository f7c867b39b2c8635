"""What torch.compile has made of the units: it falls back to Python without an error."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What dynamo has counted in this process so far."""

    tried: int = 0
    """Functions that it began to compile."""

    done: int = 0
    """Of those, the ones that it compiled, in one piece or in several."""

    breaks: Counter[str] = field(default_factory=Counter)
    """Where a function fell apart: reason and times."""


def compiled_so_far() -> Compiled:
    """Read dynamo's counters."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return Compiled(tried=frames["total"], done=frames["ok"], breaks=Counter(counters["graph_break"]))


def complaint(before: Compiled, after: Compiled) -> str | None:
    """What to tell the user of the units that were compiled in between; None: all of them are, each in one piece."""
    left = (after.tried - before.tried) - (after.done - before.done)
    breaks = after.breaks - before.breaks
    if not left and not breaks:
        return None
    reason = next(iter(breaks), "").strip().partition("\n")[0]
    where = f"; breaks: {breaks.total()}, the first: {reason}" if breaks else ""
    return (
        f"compile is true, but torch.compile did not make one graph of every unit (functions left uncompiled: {left}"
        f"{where}). The numbers are right, the step is slower than it could be. Run with "
        "TORCH_LOGS=graph_breaks,recompiles to see where. Usual causes: a cache of keys and values in training (pass "
        "use_cache=False to Hugging Face models), numbers that differ between the units of one class, and branches on "
        "data."
    )
