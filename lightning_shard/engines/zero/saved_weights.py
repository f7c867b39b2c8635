"""What autograd saves of the parameters that stage 3 gathers: which part of which one, and no data.

A product's backward needs the weight, so autograd keeps the gathered tensor in memory although DeepSpeed frees the
parameter after forward. Here a saved tensor that is a parameter or a view of one is replaced by its position, and made
anew in backward from what DeepSpeed has gathered by then, with the same values. DeepSpeed's own way,
``memory_efficient_linear``, replaces ``torch.nn.functional.linear`` for the whole process, by other kernels.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from lightning_shard.engines.zero import layout
from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require
from lightning_shard.tensors.tracing import version

require(Tensor, "_base")

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Part(NamedTuple):
    """A view of a gathered parameter."""

    parameter: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # From the parameter's own first element.
    version: int  # The parameter's, of changes in place.
    changes: int  # How often the parameters had been stepped.


class SavedWeights:
    """Leaves gathered parameters out of the graphs that are made in `dropped`."""

    def __init__(self, parameters: Iterable[Tensor], in_flight: Mapping[Tensor, Any]) -> None:
        """Small ``parameters``, always gathered, are left to autograd; ``in_flight``: live, gathers ahead of use."""
        freed = (p for p in parameters if layout.is_partitioned(p) and not p.ds_persist and not p.is_complex())  # type: ignore[attr-defined]
        self._freed: dict[int, Any] = {id(p): p for p in freed}
        self._in_flight = in_flight
        self._changes = 0

    def changed(self) -> None:
        """Say that parameters have new values: what was saved before can't be made anew."""
        self._changes += 1

    @contextmanager
    def dropped(self) -> Generator[None, None, None]:
        """Save no gathered parameter in this thread; hooks that surround it see all other tensors."""
        if not self._freed or not torch.is_grad_enabled():
            yield
            return
        # Private, and the only way to the hooks in force, of which torch calls the innermost alone: without it a meter
        # or `save_on_cpu` around a whole step would see nothing.
        outer: Hooks | None = _top_saved_tensors_default_hooks(False)
        # An output that its own node saves would keep the node alive. Both have one version counter.
        save, give = outer or (lambda tensor: (tensor.detach(), version(tensor)), _give)

        def pack(tensor: Tensor) -> Any:
            base = tensor._base
            parameter = self._freed.get(id(tensor if base is None else base))
            part = None if parameter is None else self._part(parameter, tensor)
            # A tuple in either case, so that what other hooks return may be anything.
            return (save(tensor),) if part is None else part

        def unpack(packed: Any) -> Tensor:
            return self._made(packed) if isinstance(packed, _Part) else give(packed[0])

        with saved_tensors_hooks(pack, unpack):
            yield

    def _part(self, parameter: Any, tensor: Tensor) -> _Part | None:
        """The position of ``tensor`` in the parameter; None: its memory is not the parameter's now."""
        same = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if not (
            same and layout.is_gathered(parameter) and parameter.is_contiguous() and tensor.dtype == parameter.dtype
        ):
            return None
        offset = int(tensor.storage_offset() - parameter.storage_offset())
        return _Part(parameter, tensor.size(), tensor.stride(), offset, version(parameter), self._changes)

    def _made(self, part: _Part) -> Tensor:
        parameter = part.parameter
        if part.changes != self._changes:
            raise ConfigurationError(
                "backward goes through a forward pass that was made before an optimizer step, or before parameters "
                f"were set, and needs the old values of a parameter of shape {tuple(parameter.ds_shape)}. Stage 3 has "
                "only the new ones. Run forward again after the step."
            )
        if part.version != version(parameter):
            raise _changed_in_place(parameter, version(parameter), part.version)
        data = parameter.detach() if layout.is_gathered(parameter) else self._gathered(parameter)
        return data.as_strided(part.size, part.stride, data.storage_offset() + part.offset)

    @torch.no_grad()
    def _gathered(self, parameter: Any) -> Tensor:
        """The data of a released parameter, gathered ahead or for this use; ranks, with one graph, gather together."""
        handle = self._in_flight.get(parameter)
        if handle is not None:
            # It may be waited for again, and is, when DeepSpeed comes to the parameter's module.
            handle.wait()
            return parameter.detach()
        parameter.all_gather()
        data: Tensor = parameter.detach()
        # What was gathered stays for as long as backward refers to it.
        parameter.partition()
        return data


def _give(packed: tuple[Tensor, int]) -> Tensor:
    tensor, expected = packed
    if version(tensor) != expected:
        # Autograd checks this only of what no hook has saved.
        raise _changed_in_place(tensor, version(tensor), expected)
    return tensor


def _changed_in_place(tensor: Tensor, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {found}; expected version {expected} instead. "
        "Change a copy of it, or change it after backward."
    )
