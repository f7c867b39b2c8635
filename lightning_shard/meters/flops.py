"""Count the model FLOPs of a training step by torch's formulas, on tensors without memory.

Model FLOPs follow from the step's mathematics (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311).
A multiply and an add are two. Recomputation by checkpointing or by a fused kernel does not count.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_shard.engines.memory_breakdown import tensors_in
from lightning_shard.resume.rng import undrawn
from lightning_shard.tensors import tracing
from lightning_shard.tensors.fake import fake_operations
from lightning_shard.tensors.names import replace_tensors

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Model FLOPs of one call on one rank."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_flops(
    step: Callable[[M, Any], object], module: M, batch: Any, *, device: torch.device | None = None
) -> FlopCount:
    """Count the model FLOPs of ``step(module, batch)`` and of backward from its result, as on ``device`` (default: the
    CPU). Any rank may call it alone.

    Matrix products, convolutions and attention count, by torch's formulas. Scaled dot product attention of queries
    (..., L, E), keys (..., S, E) and values (..., S, V) counts as ``2 * numel(queries) / E * S * (E + V)`` in forward,
    and as half of that if a fused kernel gets ``is_causal``. Its backward counts as twice its forward, although fused
    kernels compute the scores again there. A mask that is given as a tensor takes nothing off.

    The step runs on fake tensors in place of the module's and the batch's, inside the ``FakeTensorMode`` of those that
    are fake already. It costs no memory and changes no parameter, buffer, gradient or random generator. Python's own
    side effects do happen. Modules that FSDP or ZeRO-3 has sharded can't be counted: count before sharding, or on a
    copy (`fake.meta_copy`). A number read from a floating tensor (``loss.item()``) is 1.0.

    ``step`` runs forward alone and returns a tensor, or tensors in mappings and sequences. Backward begins at the entry
    ``"loss"`` of a mapping, else at all tensors that need gradients. Errors of the step are raised, such as torch's
    DataDependentOutputException if it reads an integer or a mask from a tensor.
    """
    counted, place = _ModelFlops(), device or torch.device("cpu")
    with ExitStack() as stack:
        for each in (undrawn(), fake_operations(), torch.compiler.set_stance("force_eager"), NumbersReadAsOne()):
            stack.enter_context(each)

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=place, requires_grad=tensor.requires_grad)

        stack.callback(replace_tensors(module, fake))
        inputs = tracing.tree_map_only(Tensor, fake, batch)
        for each in (counted.operations, NoAttentionDropout(), torch.enable_grad()):
            stack.enter_context(each)
        output = step(module, inputs)
        loss = output.get("loss", output) if isinstance(output, Mapping) else output
        outputs = [tensor.sum() for tensor in tensors_in(loss) if tensor.requires_grad]
        forward = counted.operations.get_total_flops()
        counted.in_backward = True
        if outputs:
            torch.autograd.backward(outputs)
    return FlopCount(forward=forward, backward=counted.operations.get_total_flops() - forward)


class _ModelFlops:
    """Counts all of forward, and backward without the forward passes that checkpointing runs again."""

    def __init__(self) -> None:
        self.in_backward = False
        formulas = {operation: self._counted(formula) for operation, formula in FORMULAS.items()}
        self.operations = FlopCounterMode(display=False)
        self.operations.flop_registry |= formulas  # called with tensors, not with shapes alone
        self.operations.mod_tracker = _NoModules()  # type: ignore[assignment]

    def _counted(self, formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, **kwargs: Any) -> int:
            # Backward runs with gradients disabled. A checkpointed forward runs again inside of it with them enabled.
            recomputed = self.in_backward and torch.is_grad_enabled()
            return 0 if recomputed else formula(*args, **kwargs)

        return count


class NoAttentionDropout(TorchFunctionMode):
    """Runs attention without dropout. With dropout the CPU falls back on products, whose scores would count as
    activations and which ignore causality. Fused kernels on devices save nothing for dropout.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (index := _DROPOUT.get(func)) is not None:
            if len(args) > index:
                args = (*args[:index], 0.0, *args[index + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUT: Mapping[Any, int] = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}
"""Functions of attention, with the index of the dropout probability among their arguments."""


class NumbersReadAsOne(tracing.TorchDispatchMode):
    """Returns 1.0 for a number that is read from a floating tensor. Such a number is logged or summed and decides no
    shape. Grouped products of experts run in bf16, because torch has a fake implementation for no other dtype.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is tracing.READ_NUMBER and args[0].is_floating_point():
            return 1.0
        if func is tracing.GROUPED_PRODUCTS and args[0].dtype != torch.bfloat16:
            low = (each.to(torch.bfloat16) for each in args[:2])
            return func(*low, *args[2:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


class _NoModules(nullcontext[None]):
    """Replaces the counter's module tracker, whose hooks fail under `torch.autograd.grad` and keep recomputed tensors
    alive.
    """

    parents = frozenset({"Global"})


def _attention(packet: Any, times: int) -> Callable[..., int]:
    """A formula for a fused kernel that takes ``times`` the FLOPs of its forward: of scores and weighted sums, for half
    of the pairs with ``is_causal``.
    """
    names = [argument.name for argument in tracing.schema_of(packet.default).arguments]

    def formula(*args: Any, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = (given[name].shape for name in ("query", "key", "value"))
        # The leading dims are the queries', because keys may have fewer heads.
        flops = 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return times * (flops // 2 if given.get("is_causal", False) else flops)

    return formula


def _recurrent(steps: Tensor, weight: Any, *others: Any, **more: Any) -> int:
    """FLOPs of the products with both weights at each of ``steps`` (..., inputs). cuDNN passes all layers' weights in a
    list.
    """
    weights = weight if isinstance(weight, list | tuple) else (weight, others[0])
    return 2 * prod(steps.shape[:-1]) * sum(w.numel() for w in weights if w.ndim == 2)


FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{packet: _attention(packet, 1) for packet in tracing.ATTENTION},
    **{packet: _attention(packet, 2) for packet in tracing.ATTENTION_BACKWARD},
    **dict.fromkeys(tracing.RECURRENT, _recurrent),
    **dict.fromkeys(tracing.RECURRENT_BACKWARD, lambda *args, **more: 2 * _recurrent(*args, **more)),
}
"""Operators, with functions that count their FLOPs from their arguments and ``out_val``."""
