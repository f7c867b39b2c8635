"""Bytes of the tensors that are alive at each moment of a traced step: activations, and gradients of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_shard.meters.traced_operations import NumbersReadAsOne

Phase = Literal["forward", "backward"]

MEASURES = ("activations", "peak", "peak_gradients", "end_activations", "end_gradients", "at_reduction")
"""The fields of a `Segment` that are bytes."""


@dataclass(kw_only=True)
class Segment:
    """A part of a step in which one shard unit computes. Bytes are of tensors that the step made.

    Only those gradients count whose unit still lacks others: the tracer frees them once the unit has all of its own.
    """

    phase: Phase
    unit: str  # The unit; "": code and modules outside of all units.
    activations: int = 0  # The most bytes of activations: of everything but gradients of parameters.
    peak: int = 0  # The most bytes of activations and gradients together.
    peak_gradients: int = 0  # Of ``peak``, the gradients.
    end_activations: int = 0  # Activations when it ends.
    end_gradients: int = 0  # Gradients when it ends.
    # Activations and gradients when its unit has all of its gradients; 0: that is in another segment.
    at_reduction: int = 0
    complete: tuple[str, ...] = ()  # Units that have all of their gradients when it ends.
    # Whether some parameter has its gradient: before the first one an engine has allocated nothing to reduce it in.
    has_gradients: bool = False


class DataDependent(RuntimeError):
    """An operation whose result depends on values, which the tensors of a traced step do not have."""


class LiveBytes(NumbersReadAsOne):
    """Follows every storage from the operation that makes it to its end."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """``known``: tensors that do not count, such as parameters and buffers."""
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._gradients: set[int] = set()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._has_gradients = False
        self.activations = 0
        self.gradients = 0
        self.segments: list[Segment] = []
        self.last_operation = ""

    def begin(self, phase: Phase, unit: str) -> None:
        """Begin a segment; the one before ends."""
        if self.segments:
            self.finish()
            if (self.segments[-1].phase, self.segments[-1].unit) == (phase, unit):
                return
        self.segments.append(Segment(phase=phase, unit=unit, has_gradients=self._has_gradients))
        self.note()

    def first_gradient(self) -> None:
        """A parameter has its gradient; if none had, a segment begins with it."""
        if self._has_gradients:
            return
        self._has_gradients = True
        self.finish()
        last = self.segments[-1]
        self.segments.append(Segment(phase=last.phase, unit=last.unit, complete=last.complete, has_gradients=True))
        self.note()

    def finish(self) -> None:
        """End the last segment."""
        self.segments[-1].end_activations, self.segments[-1].end_gradients = self.activations, self.gradients

    def track(self, tensors: Any) -> None:
        """Count the storages of ``tensors`` that are new."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known and key not in self._sizes:
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
        """Compare what is alive now with the most so far."""
        if not self.segments:
            return
        segment = self.segments[-1]
        segment.activations = max(segment.activations, self.activations)
        if self.activations + self.gradients > segment.peak:
            segment.peak, segment.peak_gradients = self.activations + self.gradients, self.gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        self.last_operation = str(func)
        if func is torch.ops.aten._local_scalar_dense.default and not args[0].is_floating_point():
            raise DataDependent(f"{self.last_operation} reads a number of dtype {args[0].dtype} out of a tensor")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.track(result)
        self.note()
        return result
