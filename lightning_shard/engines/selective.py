"""Activation checkpointing that saves what is expensive: matrix products, convolutions and attention.

Backward then computes again what costs little but memory (norms, activation functions, dropout, casts, additions), and
no FLOP that counts. It is torch's selective activation checkpointing, with the operators that its FLOP counter knows
as those to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from lightning_shard.tensors.tracing import CPU_ATTENTION, OVERRIDEABLE_ATTENTION, TorchDispatchMode

OBSERVERS: list[Callable[[Any], None]] = []
"""Called with the result of each operator that is saved, outside of compiled code; empty but in a measured step."""

# Attention that torch's counter has no formula for.
_ATTENTION = {CPU_ATTENTION, OVERRIDEABLE_ATTENTION}


def contexts() -> tuple[Any, Any]:
    """What ``torch.utils.checkpoint`` runs forward, and forward again in backward, in: its ``context_fn``."""
    forward, again = create_selective_checkpoint_contexts(_policy)
    if TracingContext.try_get() is not None:
        # torch.compile marks the operators of its graph by torch's own.
        return forward, again
    return _Expensive(forward, OBSERVERS), _Expensive(again, [])


def is_kept(operator: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether an operator's results are saved for backward, when it is called so."""
    packet = getattr(operator, "overloadpacket", operator)
    # A kernel that is not run again does not advance the random numbers for what comes after it.
    return (packet in flop_registry or packet in _ATTENTION) and not _drops_out(operator, args, kwargs or {})


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "dropout_p" in kwargs:
        return bool(kwargs["dropout_p"] != 0)
    schema = getattr(operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    index = names.index("dropout_p") if "dropout_p" in names else len(args)
    return index < len(args) and bool(args[index] != 0)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


class _Expensive(TorchDispatchMode):
    """Hands what is saved to one of torch's modes, and no other operator.

    Those insist on the same operators in backward as in forward, and engines' hooks run others there: a part of a
    model that is gathered already is not gathered again.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: TorchDispatchMode, observers: list[Callable[[Any], None]]) -> None:
        super().__init__()
        self._mode = mode
        self._observers = observers

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what is compiled inside of a checkpointed module is compiled all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or find what it gave in forward."""
        if not is_kept(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        result = self._mode.__torch_dispatch__(func, types, args, kwargs)
        for observe in self._observers:
            observe(result)
        return result
