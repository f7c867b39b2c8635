"""The hooks that DeepSpeed's stage 3 puts on every module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines import after_backward
from lightning_shard.engines.zero import layout
from lightning_shard.errors import ConfigurationError


def replace(offload: Any, device: torch.device) -> None:
    """Replace those hooks of ``offload``, a ``DeepSpeedZeRoOffload`` over a module on ``device``, that change results.

    What a module's parameters are in its forward, DeepSpeed looks for in its output, and fails for objects without
    ``__dict__`` and for keys that are no strings. What tells of the end of its backward pass is in `after_backward`.
    """
    # Each module has one before its forward and one after it.
    for handle in offload.forward_hooks[1::2]:
        _put(handle, partial(_after_forward, _hook(handle)))
    for joins, marks in zip(offload.backward_hooks[::2], offload.backward_hooks[1::2], strict=True):
        backward = _Backward(offload, device)
        _put(marks, backward.begin_forward)
        _put(joins, backward.end_forward)


def _hook(handle: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = handle.hooks_dict_ref()[handle.id]
    return found


def _put(handle: Any, hook: Callable[..., Any]) -> None:
    handle.hooks_dict_ref()[handle.id] = hook


class _Backward:
    """Gathers a module's parameters for each of its backward passes, and releases them after it.

    DeepSpeed counts the passes by the calls of forward, and gathers for no more of them; but gradients that are taken
    in a step (gradient penalties) go through a module once more.
    """

    def __init__(self, offload: Any, device: torch.device) -> None:
        self._offload, self._device = offload, device
        self._marks: list[Tensor | None] = []
        self._active = False

    def begin_forward(self, module: nn.Module, inputs: Any) -> None:
        self._marks.append(after_backward.mark(partial(self._end, module), self._device))

    def end_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        marked = self._marks.pop()
        if marked is None:
            return output
        own = {id(tensor) for tensor in inputs if isinstance(tensor, Tensor)}

        def join(tensor: Tensor) -> Tensor:
            # What a module returns as it got it is none of its own.
            if id(tensor) in own:
                return tensor
            joined: Any = after_backward.join(tensor, marked, partial(self._begin, module))
            if layout.is_partitioned(tensor):
                # By it DeepSpeed knows a parameter that modules return to each other.
                joined.ds_param_alias = tensor
            return joined

        return after_backward.replaced(output, join)

    def _begin(self, module: nn.Module) -> None:
        self._active = True
        self._offload.pre_sub_module_backward_function(module)

    def _end(self, module: nn.Module) -> None:
        if self._active:
            self._active = False
            self._offload.post_sub_module_backward_function(module)


def _after_forward(hook: Callable[..., None], module: nn.Module, inputs: Any, output: Any) -> None:
    shown = output
    if output is not None and not isinstance(output, Tensor | list | tuple):
        names = [f.name for f in fields(output)] if is_dataclass(output) else getattr(output, "__dict__", ())
        values = output.values() if isinstance(output, Mapping) else (getattr(output, name, None) for name in names)
        shown = [value for value in values if isinstance(value, Tensor)]
        own = any(layout.is_partitioned(p) for p in module.parameters(recurse=False))
        looked_into = isinstance(output, dict) or is_dataclass(output)
        if own and not looked_into and any(value.requires_grad for value in shown):
            raise ConfigurationError(
                f"{type(module).__name__} has parameters of its own and returns a {type(output).__name__}, in which no "
                "tensors are looked for, so that stage 3 would not gather the parameters in backward. Return a tensor, "
                "tuple, list, dict or dataclass, compute in a submodule such as nn.Linear, or use shard_fsdp."
            )
    hook(module, inputs, shown)
