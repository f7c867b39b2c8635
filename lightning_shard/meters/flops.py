"""Model FLOPs of a training step, counted by torch's formulas on tensors without memory.

They are what the mathematics of a step asks for (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311),
a multiply and an add being two, and not what checkpointing or a fused kernel computes again.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_shard.engines.resident import tensors_in
from lightning_shard.resume.rng import undrawn
from lightning_shard.tensors import tracing
from lightning_shard.tensors.fake import fake_operations


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Model FLOPs of one call on one rank."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_flops(function: Callable[[], object]) -> FlopCount:
    """The model FLOPs of ``function`` and of a backward pass from what it returns. Any rank may call it alone.

    Matrix products, convolutions and attention count, as torch's formulas have them. Scaled dot product attention of
    queries (..., L, E), keys (..., S, E) and values (..., S, V) counts as ``2 * numel(queries) / E * S * (E + V)`` in
    forward, half of that where ``is_causal``, and twice its forward in backward, though fused kernels compute the
    scores again there. A mask that is given as a tensor takes nothing off.

    The call runs on fake tensors, inside of a ``FakeTensorMode`` where some exist already: it costs no memory and
    changes no parameter, buffer, gradient or state of a random generator; Python's own side effects do happen. Modules
    that FSDP or ZeRO-3 has sharded can't be counted: count before, or on a copy (`fake.meta_copy`). A number read from
    a floating tensor (``loss.item()``) is 1.0.

    ``function`` runs forward alone and returns a tensor, or tensors in mappings and sequences; backward begins at the
    one under ``"loss"`` where a mapping has it, else at all that need gradients. What it raises is raised, such as
    torch's DataDependentOutputException where it reads an integer or a mask off a tensor.
    """
    counted = _ModelFlops()
    with (
        undrawn(), fake_operations(), _eager_forward(), NumbersReadAsOne(), counted.operations,
        attention_by(counted.count_attention), torch.enable_grad(),
    ):  # fmt: skip
        output = function()
        loss = output.get("loss", output) if isinstance(output, Mapping) else output
        outputs = [tensor for tensor in tensors_in(loss) if tensor.requires_grad]
        forward = counted.total()
        counted.in_backward = True
        if leaves := _leaves(outputs):
            # It leaves ``.grad`` alone, and with it hooks that wait for a gradient to be complete.
            torch.autograd.grad([output.sum() for output in outputs], leaves, allow_unused=True)
    return FlopCount(forward=forward, backward=counted.total() - forward)


class _ModelFlops:
    """Counts all of forward, and of backward what is not a forward of checkpointing."""

    def __init__(self) -> None:
        self.in_backward = False
        self.attention = 0
        formulas = {operation: self._counted(formula) for operation, formula in FORMULAS.items()}
        self.operations = FlopCounterMode(display=False)
        self.operations.flop_registry |= formulas  # which are given the tensors, and not their shapes alone
        self.operations.mod_tracker = _NoModules()  # type: ignore[assignment]

    def total(self) -> int:
        return self.operations.get_total_flops() + self.attention

    def _counts(self) -> bool:
        # Backward runs without gradients; a checkpointed forward runs again inside of it with them.
        return not (self.in_backward and torch.is_grad_enabled())

    def _counted(self, formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, **kwargs: Any) -> int:
            return formula(*args, **kwargs) if self._counts() else 0

        return count

    def count_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        """In place of ``scaled_dot_product_attention``, whose kernels hide causality: counts, computes nothing."""
        flops = attention_flops(query.shape, key.shape, value.shape, is_causal=is_causal)
        self.attention += flops if self._counts() else 0

        def add_backward() -> None:
            self.attention += 2 * flops

        return _Attention.apply(query, key, value, attn_mask, add_backward)


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


@contextmanager
def _eager_forward() -> Generator[None, None, None]:
    """Nothing is compiled, and reentrant checkpointing runs through: it hides its parameters until backward."""

    class RunThrough:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    reentrant = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = RunThrough  # type: ignore[assignment,misc]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """The tensors that a backward pass from ``outputs`` would give gradients to."""
    leaves = [output for output in outputs if output.grad_fn is None]
    waiting, seen = [output.grad_fn for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            waiting += [following for following, _ in node.next_functions]
    return leaves


_attention = functional.scaled_dot_product_attention


class NumbersReadAsOne(tracing.TorchDispatchMode):
    """A number that is read off a floating tensor is 1.0: it is only logged or added up, and decides no shape. Products
    of experts run in bf16, of which alone there is a fake implementation.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is tracing.READ_NUMBER and args[0].is_floating_point():
            return 1.0
        if func is tracing.GROUPED_PRODUCTS and args[0].dtype != torch.bfloat16:
            low = (each.to(torch.bfloat16) for each in args[:2])
            return func(*low, *args[2:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


class _NoModules(nullcontext[None]):
    """No FLOPs by submodule: its hooks do not go with `torch.autograd.grad`, and keep what is computed again alive."""

    parents = frozenset({"Global"})


def _cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, **others: Any
) -> int:
    return attention_flops(query.shape, key.shape, value.shape, is_causal=is_causal)


def _recurrent(steps: Tensor, weight: Any, *others: Any, **more: Any) -> int:
    """Products with both weights at each of ``steps`` (..., inputs); cuDNN has a list of all layers' weights."""
    weights = weight if isinstance(weight, list | tuple) else (weight, others[0])
    return 2 * prod(steps.shape[:-1]) * sum(w.numel() for w in weights if w.ndim == 2)


FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    tracing.CPU_ATTENTION: _cpu_attention,
    # (gradient, query, key, value, output, logsumexp, dropout, is_causal)
    tracing.CPU_ATTENTION_BACKWARD: lambda *args, **_: 2 * _cpu_attention(args[1], args[2], args[3], 0.0, args[7]),
    **dict.fromkeys(tracing.RECURRENT, _recurrent),
    **dict.fromkeys(tracing.RECURRENT_BACKWARD, lambda *args, **more: 2 * _recurrent(*args, **more)),
}
"""Operators to what counts their FLOPs, called with their arguments and ``out_val``."""


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, is_causal: bool) -> int:
    """Forward FLOPs of attention of queries (..., L, E), whose leading dims count (keys may have fewer heads), keys
    (..., S, E) and values (..., S, V): of scores and weighted sums, half of the pairs with ``is_causal``.
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
    """``scaled_dot_product_attention`` without dropout, for which fused kernels keep nothing, while the CPU falls back
    on products, whose scores would count as activations.
    """
    # (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs.pop("dropout_p", None)
    return _attention(*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()), **kwargs)
