"""Modules and tensors that have shapes, dtypes and devices and no memory. The one user of torch's fake tensors.

Fake tensors are documented (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html) but lie below a
private module; torch 2.11 to 2.13 have them there.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

M = TypeVar("M", bound=nn.Module)


@contextmanager
def abstract_mode() -> Generator[None, None, None]:
    """Inside, operations give fake tensors, of real ones too; nothing new where such a mode is on already."""
    if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        yield
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def abstract_copy(module: M) -> M:
    """A deep copy whose parameters and buffers are on the meta device; tied ones stay tied.

    What else the module holds is copied as it is. ``module`` has whole parameters, as before sharding.

    Raises:
        Exception: whatever an attribute raises that can't be copied, such as a lock or an open file.
    """
    memo: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = _without_values(tensor)
    return copy.deepcopy(module, memo)


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
