"""Attention counted from its shapes, the same whichever kernel would compute it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_scaled_dot_product_attention = functional.scaled_dot_product_attention


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
def counting_attention(add: Callable[[int], None], is_useful: Callable[[], bool]) -> Generator[None, None, None]:
    """Inside, ``scaled_dot_product_attention`` computes nothing, and tells ``add`` its FLOPs and those of its backward.

    Kernels do not tell torch's counter whether they are causal, some are unknown to it, and the one that is made of
    matrix products masks them only afterwards.

    Args:
        add: called with numbers of FLOPs.
        is_useful: asked in forward whether that is the first time it runs.
    """

    def counted(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        flops = attention_flops(query.shape, key.shape, value.shape, is_causal=is_causal)
        if is_useful():
            add(flops)
        return _Attention.apply(query, key, value, attn_mask, lambda: add(2 * flops))

    functional.scaled_dot_product_attention = counted
    try:
        # For who imported the function by its name. A mode is off inside of torch's own Python functions, such as
        # `multi_head_attention_forward`, which look the name up.
        with _Redirect(counted):
            yield
    finally:
        functional.scaled_dot_product_attention = _scaled_dot_product_attention


class _Attention(torch.autograd.Function):
    """Shapes of attention and of its gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, add_backward: Callable[[], None]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.add_backward = add_backward
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.add_backward()
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(torch.empty_like(tensor) if needs else None for tensor, needs in needed), None)


class _Redirect(TorchFunctionMode):
    """Attention is counted; a number read from a floating tensor is 1.0: it is logged, and decides no shape."""

    def __init__(self, counted: Callable[..., Tensor]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _scaled_dot_product_attention:
            return self._counted(*args, **(kwargs or {}))
        if func in (Tensor.item, Tensor.__float__) and args[0].is_floating_point() and args[0].numel() == 1:
            return 1.0
        return func(*args, **(kwargs or {}))
