"""Where a step's host waits for its device: reads of tensors' values, seen on a CPU as operators that do them.

There reads of what lies on the host anyway look the same, so that each has a caller who is judged once. The stand-in
for a GPU counts waits itself: reads, copies that block, and waits for streams and events.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests import stand_in

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class Waits(TorchDispatchMode):
    """Counts waits by the innermost function of a package that they are in, and exchanges of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._before = 0
        self._undo = ExitStack()

    def __enter__(self) -> Any:
        self._before = _waited()
        for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
            self._undo.callback(setattr, dist, name, function := getattr(dist, name))
            setattr(dist, name, partial(self._exchange, function))
        return super().__enter__()

    def _exchange(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.found[OBJECTS] += 1
        return function(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()
        # Those for streams and events are no operators.
        self.found[SYNCHRONIZE] += _waited() - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _waited()
        out = func(*args, **(kwargs or {}))
        waited = _waited() - before
        self._before += waited
        if waited or (func in READS and not stand_in.chosen()):
            self.found[_caller(sys._getframe(1))] += max(waited, 1)
        return out


SYNCHRONIZE, OBJECTS = "synchronize", "objects"


def _waited() -> int:
    return int(stand_in.extension().counts()["host_waits"]) if stand_in.chosen() else 0


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
