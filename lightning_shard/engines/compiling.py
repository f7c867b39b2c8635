"""What torch.compile has made of the units: it falls back to Python without an error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What dynamo has counted in this process so far."""

    functions: int = 0
    """Tried."""
    whole: int = 0
    """Compiled, in one piece or in several."""
    breaks: int = 0
    """Places at which a function fell apart."""
    reason: str = ""
    """Of the last break."""


def compiled_so_far() -> Compiled:
    """Read dynamo's counters."""
    from torch._dynamo.utils import counters

    frames, breaks = counters["frames"], counters["graph_break"]
    reason = next(reversed(breaks), "").strip().splitlines()[:1]
    return Compiled(functions=frames["total"], whole=frames["ok"], breaks=sum(breaks.values()), reason="".join(reason))


def complaint(before: Compiled, after: Compiled) -> str | None:
    """What to tell the user of the units that were compiled in between; None: all of them are, each in one piece."""
    left, breaks = (after.functions - before.functions) - (after.whole - before.whole), after.breaks - before.breaks
    if not left and not breaks:
        return None
    where = f", and {breaks} breaks, the last: {after.reason}" if breaks else ""
    return (
        f"compile is true, but torch.compile did not make one graph of every unit ({left} functions left uncompiled"
        f"{where}). The numbers are right, the step is slower than it could be. Run with "
        "TORCH_LOGS=graph_breaks,recompiles to see where. Usual causes: a cache of keys and values in training (pass "
        "use_cache=False to Hugging Face models), numbers that differ between the units of one class, and branches on "
        "data."
    )
