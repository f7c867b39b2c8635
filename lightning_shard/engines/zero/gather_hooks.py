"""Replacements for hooks of stage 3 that gather and release parameters, if DeepSpeed's change results or fail."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines import after_backward
from lightning_shard.engines.zero import flat_layout
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.tracing import tree_leaves


def replace_gather_hooks(offload: Any, device: torch.device) -> None:
    """Replace hooks of ``offload``, a ``DeepSpeedZeRoOffload`` over a module on ``device``: after forward for outputs
    without ``__dict__`` or string keys, and around backward by `after_backward`.
    """
    flat_layout.trace_gathered_modules(offload)
    _remove_repeated(offload.forward_hooks)
    _remove_repeated(offload.backward_hooks)
    for handle in offload.forward_hooks[1::2]:  # Each module has one before its forward and one after it.
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = partial(_after_forward, hooks[handle.id])
    for joins, marks in zip(offload.backward_hooks[::2], offload.backward_hooks[1::2], strict=True):
        gather = _BackwardGather(offload, device)
        marks.hooks_dict_ref()[marks.id] = gather.before_forward
        (takes_kwargs,) = marks.extra_dict_ref
        takes_kwargs()[marks.id] = True
        joins.hooks_dict_ref()[joins.id] = gather.after_forward


def _remove_repeated(handles: list[Any]) -> None:
    """Remove all but the first two hooks of each module: DeepSpeed sets two for every name of a module."""
    kept: dict[int, list[Any]] = {}
    for pair in zip(handles[::2], handles[1::2], strict=True):
        first = kept.setdefault(id(pair[0].hooks_dict_ref()), [*pair])
        if pair[0] is not first[0]:
            for handle in pair:
                handle.remove()
    handles[:] = [handle for pair in kept.values() for handle in pair]


class _BackwardGather:
    """Gathers a module's parameters for each of its backward passes. DeepSpeed does so once per call of forward, but a
    gradient penalty goes through a module twice.
    """

    def __init__(self, offload: Any, device: torch.device) -> None:
        self._offload, self._device = offload, device
        self._begun: list[tuple[Tensor, after_backward.Given] | None] = []
        self._active = False

    def before_forward(self, module: nn.Module, *inputs: Any) -> None:
        marked = after_backward.mark(partial(self._after_backward, module), self._device)
        self._begun.append(None if marked is None else (marked, after_backward.given_tensors(inputs)))

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if (begun := self._begun.pop()) is None:
            return output
        marked, given = begun

        def join(tensor: Tensor) -> Tensor:
            joined: Any = after_backward.join(tensor, marked, partial(self._before_backward, module))
            if flat_layout.is_partitioned(tensor):
                # DeepSpeed recognizes by it a parameter that modules return to each other.
                joined.ds_param_alias = tensor
            return joined

        return after_backward.replaced(output, given, join)

    def _before_backward(self, module: nn.Module) -> None:
        self._active = flat_layout.is_gathered_for(module)
        if self._active:
            self._offload.pre_sub_module_backward_function(module)

    def _after_backward(self, module: nn.Module) -> None:
        if self._active:
            self._active = False
            self._offload.post_sub_module_backward_function(module)


def _after_forward(hook: Callable[..., None], module: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):  # Of most modules. This branch saves host time.
        hook(module, inputs, [output])
        return
    values: Any = [output]  # Their containers too, which DeepSpeed does not search.
    if output is not None and not isinstance(output, list | tuple):
        names = [f.name for f in fields(output)] if is_dataclass(output) else getattr(output, "__dict__", ())
        values = output.values() if isinstance(output, Mapping) else [getattr(output, name, None) for name in names]
    shown = [value for value in tree_leaves([*values]) if isinstance(value, Tensor)]
    is_searched = isinstance(output, list | tuple | dict) or is_dataclass(output)
    has_own = not is_searched and any(flat_layout.is_partitioned(p) for p in module.parameters(recurse=False))
    if has_own and any(value.requires_grad for value in shown):
        raise ConfigurationError(
            f"{type(module).__name__} has parameters of its own and returns a {type(output).__name__}, in which no "
            "tensors are looked for, so that stage 3 would not gather the parameters in backward. Return a tensor, "
            "tuple, list, dict or dataclass, compute in a submodule such as nn.Linear, or use shard_fsdp."
        )
    hook(module, inputs, shown)
