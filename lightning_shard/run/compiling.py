"""What torch.compile makes of a run's first step: it falls back to Python without an error."""

from collections import Counter
from typing import NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class Compiled(NamedTuple):
    """What dynamo has counted in this process so far."""

    tried: int  # Functions that it began to compile.
    done: int  # Of those, the ones that it compiled, in one graph or in several.
    breaks: Counter[str]  # Where it broke a graph: reason and times.


class CompilerWatch:
    """Warns after the first training step where units were not compiled as one graph each."""

    def __init__(self, wanted: bool) -> None:
        """``wanted``: whether units are compiled."""
        self._wanted = wanted
        self._before: Compiled | None = None

    def start(self) -> None:
        self._before = _compiled_so_far() if self._wanted else None

    def after_step(self) -> None:
        before, self._before = self._before, None
        if before is not None and (text := complaint(before, _compiled_so_far())) is not None:
            rank_zero_warn(text)


def _compiled_so_far() -> Compiled:
    from torch._dynamo.utils import counters

    return Compiled(counters["frames"]["total"], counters["frames"]["ok"], Counter(counters["graph_break"]))


def complaint(before: Compiled, after: Compiled) -> str | None:
    """What to tell the user of the units that were compiled in between; None: each is one graph."""
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
