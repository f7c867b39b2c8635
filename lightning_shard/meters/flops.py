"""Model FLOPs of a training step, counted by torch's FlopCounterMode on tensors without memory.

Model FLOPs are what the mathematics of a step asks for, whatever an engine computes (Chowdhery et al. 2022, appendix
B, https://arxiv.org/abs/2204.02311): what activation checkpointing or a fused kernel computes a second time is no
part of them. A multiply and an add are two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint, flop_counter

from lightning_shard.meters.attention import counting_attention
from lightning_shard.meters.fake_tensors import fake_operations
from lightning_shard.meters.undone import undone_randomness


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Model FLOPs of one call on one rank."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Those of forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(forward=self.forward + other.forward, backward=self.backward + other.backward)


class _Phase:
    """What of the running call is counted: all of forward; of backward what is no second forward."""

    backward = False

    def is_useful(self) -> bool:
        # Backward runs without gradients; a checkpointed forward runs again inside of it with them.
        return not (self.backward and torch.is_grad_enabled())


def count_flops(function: Callable[[], object]) -> FlopCount:
    """The model FLOPs of ``function`` and of a backward pass from what it returns. Any rank may call it alone.

    Matrix products, convolutions and attention count, as torch's formulas have them; elementwise operations do not.
    Scaled dot product attention of queries (..., L, E), keys (..., S, E) and values (..., S, V) counts as
    ``2 * numel(queries) / E * S * (E + V)`` in forward, half of that where ``is_causal``, and twice its forward in
    backward, though fused kernels compute the scores again there. A mask that is given as a tensor takes nothing off.

    The call runs on fake tensors: real and meta tensors that it touches are taken for fakes of their shape, dtype and
    device, so that it costs no memory and changes no parameter, buffer, gradient or state of a random generator.
    Where fake tensors exist already, call this inside of their ``FakeTensorMode``. Python's own side effects in
    ``function`` do happen. Modules that FSDP or ZeRO-3 have cut can't be counted: count before, or on a copy
    (`fake_tensors.meta_copy`). A number read from a floating tensor (``loss.item()``) is 1.0.

    Args:
        function: runs forward alone and returns a tensor, or tensors in mappings and sequences; backward begins at
            the one under ``"loss"`` where a mapping has it, else at all that need gradients.

    Raises:
        Exception: whatever ``function`` raises, such as torch's DataDependentOutputException where it reads an
            integer or a mask off a tensor.
    """
    phase = _Phase()
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_useful_formulas(phase))
    counter.mod_tracker = _WholeCall()  # type: ignore[assignment]
    attention = {"flops": 0}

    def add(flops: int) -> None:
        attention["flops"] += flops

    with ExitStack() as stack:
        stack.enter_context(undone_randomness())
        stack.enter_context(fake_operations())
        stack.enter_context(_whole_forward())
        stack.enter_context(counter)
        stack.enter_context(counting_attention(add, phase.is_useful))
        stack.enter_context(torch.enable_grad())
        outputs = _outputs(function())
        forward = counter.get_total_flops() + attention["flops"]
        phase.backward = True
        _backward(outputs)
        total = counter.get_total_flops() + attention["flops"]
    return FlopCount(forward=forward, backward=total - forward)


class _WholeCall:
    """Attributes FLOPs to no submodule, which takes hooks that do not go with `torch.autograd.grad`."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


def _useful_formulas(phase: _Phase) -> dict[Any, Any]:
    """The formulas of torch, each giving 0 for what is computed a second time."""
    # `_get_raw`: the formula is given the tensors, as torch's registered ones, which take their shapes by themselves.
    return {op: _useful(formula, phase) for op, formula in flop_counter.flop_registry.items()}


def _useful(formula: Callable[..., int], phase: _Phase) -> Callable[..., int]:
    def count(*args: Any, **kwargs: Any) -> int:
        return formula(*args, **kwargs) if phase.is_useful() else 0

    count._get_raw = True  # type: ignore[attr-defined]
    return count


@contextmanager
def _whole_forward() -> Generator[None, None, None]:
    """Nothing compiled, and reentrant checkpointing run through: it hides its parameters until backward."""

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


def _outputs(output: object) -> list[Tensor]:
    """Where backward begins."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        return _outputs(output["loss"] if "loss" in output else list(output.values()))
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _outputs(item)]
    return []


def _backward(outputs: list[Tensor]) -> None:
    """A backward pass that leaves ``.grad`` alone, and with it hooks that wait for a gradient to be complete."""
    leaves = _leaves(outputs)
    if leaves:
        torch.autograd.grad([output.sum() for output in outputs], leaves, allow_unused=True)


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """The tensors that a backward pass from ``outputs`` would give gradients to."""
    waiting = [output.grad_fn for output in outputs]
    leaves = [output for output in outputs if output.grad_fn is None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves
