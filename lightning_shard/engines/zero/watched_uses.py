"""What a step does to parameters of stage 3 that would be wrong or lost without a word.

A released parameter has no elements: its norm is 0, and a write to it changes nothing. What is written to a gathered
one is freed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.engines.refusals import not_gathered
from lightning_shard.engines.zero import layout
from lightning_shard.errors import ConfigurationError

_VIEWS = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
"""Functions whose result stands for the parameter."""

_WATCHED = 8
"""Steps that are looked at: the same code runs in the others, and each operator costs host time here."""


class WatchedUses(TorchFunctionMode):
    """Raises where a step uses a released parameter, or writes to a gathered one."""

    def __init__(self, strategy: str, name_of: Callable[[Tensor], str]) -> None:
        """``strategy`` is named in the messages, and ``name_of`` parameters."""
        super().__init__()
        self._name_of = name_of
        self._strategy = strategy
        self._paused = False
        self._views = WeakTensorKeyDictionary()
        self._steps = 0

    @contextmanager
    def watched(self, gathers: bool) -> Generator[None, None, None]:
        """Look at one of the first steps, of an engine that ``gathers`` parameters in it."""
        self._steps += 1
        with self if gathers and self._steps <= _WATCHED else nullcontext():
            yield

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """DeepSpeed's own work on parameters."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; ConfigurationError: it computes with a released parameter, or writes to a parameter."""
        used = [] if self._paused else [base for each in _flat(args) if (base := self._base(each)) is not None]
        if used and func not in _VIEWS and _writes(func):
            self._refuse_write(func, used[0], next(iter(_flat(args))))
        out = func(*args, **(kwargs or {}))
        if used and func in _VIEWS:
            self._views[out] = used[0]
        elif used and isinstance(out, Tensor) and not all(base.numel() for base in used):
            # ``weight.new_zeros(n)`` and ``x.to(weight)`` ask for a dtype and a device.
            name, of_first = func.__name__, self._base(args[0]) is not None
            if not (name.startswith("new_") if of_first else name in ("to", "type_as")):
                raise not_gathered(self._strategy)
        return out

    def _refuse_write(self, func: Callable[..., Any], parameter: Tensor, first: Any) -> None:
        if not parameter.numel():
            raise not_gathered(self._strategy)
        if self._base(first) is not None:
            raise ConfigurationError(
                f"The step writes to {self._name_of(parameter)} with {func.__name__}, but under {self._strategy} "
                "that is a gathered copy, which is freed with what was written. Write between steps "
                "with set_full_tensor(trainer, name, value), or use shard_ddp or shard_deepspeed_stage_2."
            )

    def _base(self, tensor: Any) -> Tensor | None:
        """The sharded parameter that ``tensor`` is or stands for."""
        if not isinstance(tensor, Tensor):
            return None
        return tensor if layout.is_partitioned(tensor) else self._views.get(tensor)


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for each in args:
        if isinstance(each, (list, tuple)):
            yield from each
        else:
            yield each


def _writes(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_")
