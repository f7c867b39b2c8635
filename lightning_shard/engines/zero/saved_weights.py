"""Keep gathered parameters of stage 3 out of autograd's graphs.

Autograd would keep a gathered weight for backward although DeepSpeed frees the parameter after forward. Here it saves
the position of a parameter, or of a view of one. In backward the view is made of data that are gathered again.
DeepSpeed's own ``memory_efficient_linear`` replaces ``torch.nn.functional.linear`` by other kernels.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from lightning_shard.engines.zero import flat_layout
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
    version: int  # Of the parameter, counting writes in place.
    changes: int  # Steps of the parameters before.


class SavedWeights:
    """Saves positions in place of gathered parameters in the graphs of `save_positions`."""

    def __init__(self, parameters: Iterable[Tensor], in_flight: Mapping[Tensor, Any]) -> None:
        """Small ``parameters`` are always gathered, and left to autograd. ``in_flight``: the running gathers, live."""
        freed = (p for p in parameters if flat_layout.is_partitioned(p) and not p.ds_persist and not p.is_complex())  # type: ignore[attr-defined]
        self._freed: dict[int, Any] = {id(p): p for p in freed}
        self._in_flight = in_flight
        self._changes = 0

    def note_new_values(self) -> None:
        """Parameters have new values: saved positions are of the old ones."""
        self._changes += 1

    @contextmanager
    def save_positions(self) -> Generator[None, None, None]:
        """Save no gathered parameter in this thread. Surrounding hooks see all other tensors."""
        if not self._freed or not torch.is_grad_enabled():
            yield
            return
        # torch calls the innermost hooks alone, and only this private function returns the outer ones. Without them a
        # meter or `save_on_cpu` around a whole step would see nothing.
        outer: Hooks | None = _top_saved_tensors_default_hooks(False)
        # Detached: a node that saves its own output would keep itself alive. Both share a version counter.
        save, give = outer or (lambda tensor: (tensor.detach(), version(tensor)), _give)

        def pack(tensor: Tensor) -> Any:
            base = tensor._base
            parameter = self._freed.get(id(tensor if base is None else base))
            part = None if parameter is None else self._part(parameter, tensor)
            # A tuple in both cases, because other hooks may return any object.
            return (save(tensor),) if part is None else part

        def unpack(packed: Any) -> Tensor:
            return self._view(packed) if isinstance(packed, _Part) else give(packed[0])

        with saved_tensors_hooks(pack, unpack):
            yield

    def _part(self, parameter: Any, tensor: Tensor) -> _Part | None:
        """The position of ``tensor`` in the parameter. None: it does not share the parameter's memory now."""
        shares = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        plain = parameter.is_contiguous() and tensor.dtype == parameter.dtype
        if not (shares and plain and flat_layout.is_gathered(parameter)):
            return None
        offset = int(tensor.storage_offset() - parameter.storage_offset())
        return _Part(parameter, tensor.size(), tensor.stride(), offset, version(parameter), self._changes)

    def _view(self, part: _Part) -> Tensor:
        parameter = part.parameter
        if part.changes != self._changes:
            raise ConfigurationError(
                "backward goes through a forward pass that was made before an optimizer step, or before parameters "
                f"were set, and needs the old values of a parameter of shape {tuple(parameter.ds_shape)}. Stage 3 has "
                "only the new ones. Run forward again after the step."
            )
        if part.version != version(parameter):
            raise _changed_in_place(parameter, version(parameter), part.version)
        data = parameter.detach() if flat_layout.is_gathered(parameter) else self._gathered(parameter)
        return data.as_strided(part.size, part.stride, data.storage_offset() + part.offset)

    @torch.no_grad()
    def _gathered(self, parameter: Any) -> Tensor:
        """Gather a released parameter, or wait for a gather ahead of use. Ranks have one graph, and gather together."""
        handle = self._in_flight.get(parameter)
        if handle is not None:
            # DeepSpeed waits again at the parameter's module, which is allowed.
            handle.wait()
            return parameter.detach()
        parameter.all_gather()
        data: Tensor = parameter.detach()
        # The gathered memory stays while backward refers to it.
        parameter.partition()
        return data


def _give(packed: tuple[Tensor, int]) -> Tensor:
    tensor, expected = packed
    if version(tensor) != expected:
        # Autograd checks this only for tensors that no hook has saved.
        raise _changed_in_place(tensor, version(tensor), expected)
    return tensor


def _changed_in_place(tensor: Tensor, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {found}; expected version {expected} instead. "
        "Change a copy of it, or change it after backward."
    )
