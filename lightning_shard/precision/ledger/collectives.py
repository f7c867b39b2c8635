"""Seeing the collectives that reduce gradients.

All of torch's collectives pass the dispatcher as ``c10d`` or ``_c10d_functional`` operators: FSDP2's and
``replicate``'s, those of communication hooks, and those that DistributedDataParallel's reducer calls from C++. The
autograd engine hands the mode on to its threads. What does not pass it is not seen: a library that calls NCCL or MPI
itself, and DTensor's own collectives, which run below a DTensor's operator.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from lightning_shard.precision.ledger.record import Reduction
from lightning_shard.tensors.tracing import TorchDispatchMode, tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional")
_REDUCING = ("allreduce", "all_reduce", "reduce_scatter", "reduce_")
_FSDP = os.path.join("torch", "distributed", "fsdp")
_FUNCTION = os.path.join("torch", "autograd", "function.py")


class WatchReductions(TorchDispatchMode):
    """Notes the dtype of every collective that sums floating tensors; meant to be around backward."""

    # What a compiled unit recomputes comes through here as well, with its random numbers' state.
    supports_higher_order_operators = True

    def __init__(self, found: list[Reduction], after: Callable[[], str]) -> None:
        """Append to ``found``; ``after`` tells the parameter whose gradient came last."""
        super().__init__()
        self._found = found
        self._after = after

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a module that is compiled in this backward is compiled all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator as it is, and note it if it reduces gradients."""
        name = _name(func) if func.namespace in _NAMESPACES else ""
        if name.startswith(_REDUCING) and not _is_of_the_users_function(inspect.currentframe()):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
            for dtype in {t.dtype for t in tensors}:
                numel = max(t.numel() for t in tensors if t.dtype == dtype)
                self._found.append(Reduction(operation=name, dtype=dtype, numel=numel, after=self._after()))
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__).strip("_")


def _is_of_the_users_function(frame: FrameType | None) -> bool:
    """Whether a collective was called by the backward of an autograd function that is not FSDP's own.

    Such a one exchanges activations, as ``torch.distributed.nn`` and SyncBatchNorm do. FSDP's own functions start
    its reduction; DDP's reducer and hooks on gradients are called by the autograd engine itself.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if _FSDP in file:
            return False
        if file.endswith(_FUNCTION):
            return True
        frame = frame.f_back
    return False
