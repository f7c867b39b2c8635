"""Where a step's host waits for its device: reads of tensors' values, seen on a CPU as operators that do them.

Reads of what lies on the host anyway look the same here, so that each has a caller who is judged once.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_shard

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
_OWN = Path(lightning_shard.__file__).parent


class Waits(TorchDispatchMode):
    """Counts reads by the innermost function of this package, DeepSpeed or Lightning that they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found[_caller(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for package in ("lightning_shard", "deepspeed", "lightning"):
            if package in path.parts and "tests" not in path.parts:
                name = path.relative_to(Path(*path.parts[: len(path.parts) - path.parts[::-1].index(package)]))
                return f"{package}/{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "the test"


class InSteps(pl.Callback):
    """Counts from the first step to the last that is named."""

    def __init__(self, first: int, last: int) -> None:
        self.waits, self._first, self._last = Waits(), first, last

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._first:
            self.waits.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._last + 1:
            self.waits.__exit__(None, None, None)
