"""Attention in a trace on the CPU, as GPUs compute it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_attention = functional.scaled_dot_product_attention


@contextmanager
def fused_attention() -> Generator[None, None, None]:
    """Inside, ``scaled_dot_product_attention`` drops nothing out.

    On GPUs fused kernels drop out by a seed, and keep what they keep without dropout; on the CPU dropout makes torch
    fall back on products, whose scores of all pairs would count as activations.
    """
    functional.scaled_dot_product_attention = _without_dropout
    try:
        # For who imported the function by its name. A mode is off inside of torch's own Python functions, such as
        # `multi_head_attention_forward`, which look the name up.
        with _Redirect():
            yield
    finally:
        functional.scaled_dot_product_attention = _attention


def _without_dropout(*args: Any, **kwargs: Any) -> Tensor:
    # (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs.pop("dropout_p", None)
    return _attention(*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()), **kwargs)


class _Redirect(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = _without_dropout if func is _attention else func
        return called(*args, **(kwargs or {}))
