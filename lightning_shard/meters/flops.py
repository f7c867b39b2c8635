"""Model FLOPs of a training step, counted by torch's formulas on tensors without memory.

They are what the mathematics of a step asks for (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311),
a multiply and an add being two, and not what checkpointing or a fused kernel computes again.
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
    """The model FLOPs of ``step(module, batch)`` and of a backward pass from what it returns, as on ``device`` (the
    CPU). Any rank may call it alone.

    Matrix products, convolutions and attention count, as torch's formulas have them. Scaled dot product attention of
    queries (..., L, E), keys (..., S, E) and values (..., S, V) counts as ``2 * numel(queries) / E * S * (E + V)`` in
    forward, half of that where a fused kernel is told ``is_causal``, and twice its forward in backward, though fused
    kernels compute the scores again there. A mask that is given as a tensor takes nothing off.

    The step runs on fake tensors in the place of the module's and the batch's, inside of a ``FakeTensorMode`` where
    some exist already: it costs no memory and changes no parameter, buffer, gradient or state of a random generator;
    Python's own side effects do happen. Modules that FSDP or ZeRO-3 has sharded can't be counted: count before, or on a
    copy (`fake.meta_copy`). A number read from a floating tensor (``loss.item()``) is 1.0.

    ``step`` runs forward alone and returns a tensor, or tensors in mappings and sequences; backward begins at the one
    under ``"loss"`` where a mapping has it, else at all that need gradients. What it raises is raised, such as torch's
    DataDependentOutputException where it reads an integer or a mask off a tensor.
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
    """Counts all of forward, and of backward what is not a forward of checkpointing."""

    def __init__(self) -> None:
        self.in_backward = False
        formulas = {operation: self._counted(formula) for operation, formula in FORMULAS.items()}
        self.operations = FlopCounterMode(display=False)
        self.operations.flop_registry |= formulas  # which are given the tensors, and not their shapes alone
        self.operations.mod_tracker = _NoModules()  # type: ignore[assignment]

    def _counted(self, formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, **kwargs: Any) -> int:
            # Backward runs without gradients; a checkpointed forward runs again inside of it with them.
            recomputed = self.in_backward and torch.is_grad_enabled()
            return 0 if recomputed else formula(*args, **kwargs)

        return count


class NoAttentionDropout(TorchFunctionMode):
    """Runs attention without dropout, for which fused kernels keep nothing, while the CPU falls back on products, whose
    scores would count as activations, and which know no causality.
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
"""Functions of attention, with the place of their dropout's probability among the arguments."""


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


def _attention(packet: Any, times: int) -> Callable[..., int]:
    """The FLOPs of a fused kernel, ``times`` those of its forward."""
    names = [argument.name for argument in tracing.schema_of(packet.default).arguments]

    def formula(*args: Any, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        shapes = (given[name].shape for name in ("query", "key", "value"))
        return times * attention_flops(*shapes, is_causal=given.get("is_causal", False))

    return formula


def _recurrent(steps: Tensor, weight: Any, *others: Any, **more: Any) -> int:
    """Products with both weights at each of ``steps`` (..., inputs); cuDNN has a list of all layers' weights."""
    weights = weight if isinstance(weight, list | tuple) else (weight, others[0])
    return 2 * prod(steps.shape[:-1]) * sum(w.numel() for w in weights if w.ndim == 2)


FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{packet: _attention(packet, 1) for packet in tracing.ATTENTION},
    **{packet: _attention(packet, 2) for packet in tracing.ATTENTION_BACKWARD},
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
