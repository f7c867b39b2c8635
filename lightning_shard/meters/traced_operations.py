"""The operations of a traced step: their FLOPs, numbers that are read off tensors, attention by other functions."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_attention = functional.scaled_dot_product_attention


class NumbersReadAsOne(TorchDispatchMode):
    """A number that is read off a floating tensor is 1.0: it is only logged or added up, and decides no shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        return func(*args, **(kwargs or {}))


def flop_counter(counts: Callable[[], bool] = lambda: True) -> FlopCounterMode:
    """Torch's counter of FLOPs, which also counts attention on the CPU, as GPUs compute it.

    Args:
        counts: asked at each operation whether it counts.
    """

    def counted(formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, **kwargs: Any) -> int:
            return formula(*args, **kwargs) if counts() else 0

        # The formula is given the tensors, as torch's registered ones, which take their shapes by themselves.
        count._get_raw = True  # type: ignore[attr-defined]
        return count

    formulas = {operation: counted(formula) for operation, formula in {**flop_registry, **_CPU_ATTENTION}.items()}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules:
    """Attributes FLOPs to no submodule: that takes hooks which do not go with `torch.autograd.grad`, and which keep
    alive what checkpointing computes again.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


def _cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, **others: Any
) -> int:
    return attention_flops(query.shape, key.shape, value.shape, is_causal=is_causal)


def _cpu_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout: float,
    is_causal: bool,
    **others: Any,
) -> int:
    return 2 * attention_flops(query.shape, key.shape, value.shape, is_causal=is_causal)


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, is_causal: bool) -> int:
    """Forward FLOPs of scaled dot product attention: of the scores and of the values' weighted sums.

    Args:
        query: (..., L, E); its leading dims count, so that keys and values may have fewer heads.
        key: (..., S, E).
        value: (..., S, V).
        is_causal: half of the pairs are masked, and count for nothing.
    """
    pairs = prod(query[:-1]) * key[-2]
    flops = 2 * pairs * (query[-1] + value[-1])
    return flops // 2 if is_causal else flops


@contextmanager
def attention_by(function: Callable[..., Tensor]) -> Generator[None, None, None]:
    """Inside, ``scaled_dot_product_attention`` is ``function``."""
    functional.scaled_dot_product_attention = function
    try:
        # For who imported the function by its name. A mode is off inside of torch's own Python functions, such as
        # `multi_head_attention_forward`, which look the name up.
        with _Redirect(function):
            yield
    finally:
        functional.scaled_dot_product_attention = _attention


class _Redirect(TorchFunctionMode):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = self._function if func is _attention else func
        return called(*args, **(kwargs or {}))


def attention_without_dropout(*args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention`` that drops nothing out.

    On GPUs fused kernels drop out by a seed, and keep what they keep without dropout; on the CPU dropout makes torch
    fall back on products, whose scores of all pairs would count as activations.
    """
    # (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs.pop("dropout_p", None)
    return _attention(*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()), **kwargs)
