"""What the compiler makes of a run's first step."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.engines import compiling


class CompilerWatch:
    """Warns after the first training step where units were not compiled as one graph each."""

    def __init__(self, wanted: bool) -> None:
        """``wanted``: whether units are compiled."""
        self._wanted = wanted
        self._before: compiling.Compiled | None = None

    def start(self) -> None:
        """Before the first step."""
        self._before = compiling.compiled_so_far() if self._wanted else None

    def after_step(self) -> None:
        """After a step, of which the first counts."""
        before, self._before = self._before, None
        if before is not None and (complaint := compiling.complaint(before, compiling.compiled_so_far())) is not None:
            rank_zero_warn(complaint)
