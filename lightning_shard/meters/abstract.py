"""Modules and tensors that have shapes, dtypes and devices and no memory. The one user of torch's fake tensors.

Fake tensors are documented (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html) but lie below a
private module; torch 2.11 to 2.13 have them there.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

M = TypeVar("M", bound=nn.Module)


@contextmanager
def abstract_mode() -> Generator[None, None, None]:
    """Inside, operations give fake tensors, of real ones too; where such a mode is on already it stays."""
    stack = _get_current_dispatch_mode_stack()
    present = next((mode for mode in reversed(stack) if isinstance(mode, FakeTensorMode)), None)
    mode = FakeTensorMode() if present is None else present
    with nullcontext() if present is not None else mode, _TakeForFakes(mode):
        yield


class _TakeForFakes(TorchDispatchMode):
    """Takes real tensors for fakes. With ``allow_non_fake_inputs`` the mode itself runs ``x.add_(1)`` on real ones."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor, static_shapes=True)


def abstract_copy(module: M) -> M:
    """A deep copy whose parameters and buffers are on the meta device; tied ones stay tied.

    What else the module holds is copied as it is. ``module`` has whole parameters, as before sharding.

    Raises:
        Exception: whatever an attribute raises that can't be copied, such as a lock or an open file.
    """
    memo: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = _without_values(tensor, torch.device("meta"))
    return copy.deepcopy(module, memo)


def place(module: nn.Module, device: torch.device) -> None:
    """Inside of `abstract_mode`, put the parameters and buffers of an abstract copy on ``device``, without memory."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _without_values(tensor, device)
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _without_values(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
