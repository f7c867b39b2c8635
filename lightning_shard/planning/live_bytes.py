"""Bytes of tensors that live at each moment of a traced step, by what they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_shard.meters.attention import attention_flops
from lightning_shard.meters.fake_tensors import TorchDispatchMode

Phase = Literal["forward", "backward"]
_ITEM = torch.ops.aten._local_scalar_dense.default
# To the place of the queries among the arguments.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: 0,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}


MEASURES = ("activations", "together", "gradients", "end", "unfinished", "reduced")
"""The fields of a `Segment` that are bytes."""


@dataclass(kw_only=True)
class Segment:
    """A part of a step in which one shard unit computes. Bytes are of tensors that the step made."""

    phase: Phase
    unit: str
    """The unit; "": code and modules outside of all units."""

    activations: int = 0
    """The most bytes of everything but gradients of parameters."""

    together: int = 0
    """The most bytes of activations and of gradients that their unit has not yet all of."""

    gradients: int = 0
    """Of those, the gradients."""

    end: int = 0
    """Activations when it ends."""

    unfinished: int = 0
    """Gradients of units that have not all of theirs, when it ends."""

    reduced: int = 0
    """Activations and gradients when its unit has all of its gradients; 0: that is in another segment."""

    done: tuple[str, ...] = ()
    """Units whose gradients are complete when it ends."""

    begun: bool = False
    """Whether a parameter has its gradient: before the first one an engine has made nothing to reduce it in."""


def live_tensors(root: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*root.parameters(), *root.buffers()]


class DataDependent(RuntimeError):
    """An operation whose result depends on data, which a traced step has none of."""


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operation that makes it to its end."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """``known``: tensors that are no part of the step, such as parameters and buffers."""
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._gradients: set[int] = set()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._begun = False
        self.activations = 0
        self.gradients = 0
        self.segments: list[Segment] = []
        self.flops = 0
        """Of the operations so far, by torch's formulas. ``FlopCounterMode`` itself tracks modules, which keeps what
        checkpointing computes again from being freed."""
        self.last = ""
        """Name of the last operation."""

    def begin(self, phase: Phase, unit: str) -> None:
        """Begin a segment; the one before ends."""
        if self.segments:
            self._close()
            if (self.segments[-1].phase, self.segments[-1].unit) == (phase, unit):
                return
        self.segments.append(Segment(phase=phase, unit=unit, begun=self._begun))
        self.note()

    def first_gradient(self) -> None:
        """A parameter has its gradient; if none had, a segment begins with it."""
        if self._begun:
            return
        self._begun = True
        self._close()
        last = self.segments[-1]
        self.segments.append(Segment(phase=last.phase, unit=last.unit, done=last.done, begun=True))
        self.note()

    def finish(self) -> list[Segment]:
        """End the last segment; all of them."""
        self._close()
        return self.segments

    def _close(self) -> None:
        self.segments[-1].end, self.segments[-1].unfinished = self.activations, self.gradients

    def track(self, tensors: Any) -> None:
        """Count the storages of ``tensors`` that are new."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._track(tensor)

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = size = storage.nbytes()
        self.activations += size
        self._references[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: Any) -> None:
        size = self._sizes.pop(key, 0)
        del self._references[key]
        if key in self._gradients:
            self._gradients.discard(key)
            self.gradients -= size
        else:
            self.activations -= size

    def is_gradient(self, tensor: Tensor) -> None:
        """Count a tensor as a gradient of a parameter from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self.activations -= self._sizes[key]
            self.gradients += self._sizes[key]

    def note(self) -> None:
        """Compare what lives now with the most so far."""
        if not self.segments:
            return
        segment = self.segments[-1]
        segment.activations = max(segment.activations, self.activations)
        if self.activations + self.gradients > segment.together:
            segment.together, segment.gradients = self.activations + self.gradients, self.gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        self.last = str(func)
        if func is _ITEM:
            return self._item(args[0])
        result = func(*args, **(kwargs or {}))
        self.flops += _flops(func, args, kwargs or {}, result)
        for tensor in _tensors(result):
            self._track(tensor)
        self.note()
        return result

    def _item(self, tensor: Tensor) -> float:
        # A number that is only logged or added up may be any; what chooses a size or a branch may not.
        if tensor.is_floating_point():
            return 1.0
        raise DataDependent(f"{self.last} reads a number of dtype {tensor.dtype} out of a tensor")


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one operation; attention on the CPU, which torch has no formula for, as on GPUs."""
    if func._overloadpacket in _CPU_ATTENTION:
        first = _CPU_ATTENTION[func._overloadpacket]
        query, key, value = (t.shape for t in args[first : first + 3])
        # forward (q, k, v, dropout, is_causal), backward (gradient, q, k, v, out, logsumexp, dropout, is_causal)
        place = 7 if first else 4
        causal = bool(args[place] if len(args) > place else kwargs.get("is_causal", False))
        return attention_flops(query, key, value, is_causal=causal) * (2 if first else 1)
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _tensors(item)
