"""Writes to parameters that no optimizer makes, such as weight clipping after a step, under DeepSpeed, whose masters
overwrite them. In stage 3 a released parameter has no elements: its norm is 0, a write changes nothing, and what is
written to a gathered one is freed with it.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.engines.observed import observed, user
from lightning_shard.engines.refusals import not_gathered
from lightning_shard.engines.zero import layout
from lightning_shard.engines.zero.running import Running, refresh
from lightning_shard.engines.zero.values import Values
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.names import named_parameters
from lightning_shard.tensors.tracing import version

_COMPARED = 3
"""Steps in which all values are compared. Later on those whose ``data`` was read, where parameters lie, and how often
they were written to, which ``parameter.data.clamp_`` does not count, unless writes were found."""


class Written:
    """Takes over, or refuses, what was written to parameters since the engine was last at work."""

    def __init__(self, module: nn.Module, running: Running, values: Values) -> None:
        self._parameters = {fqn: p for fqn, p in named_parameters(module).items() if p.is_floating_point()}
        self._running, self._values = running, values
        self._steps, self._found = 0, False
        # What stage 3 rounds on its way to the ranks (qwZ, DeepSpeed's own autocast) has other values than the masters.
        engine, stage_3 = running.engine, running.stage == 3
        self._rounds = stage_3 and (engine.zero_quantized_weights() or engine.torch_autocast_enabled())
        self._read: set[str] = set()
        self._set: set[str] = set()
        self._fqns = {id(parameter): fqn for fqn, parameter in self._parameters.items()}
        self._cast = {fqn for fqn, _, kept in self._kept() if kept.dtype != self._parameters[fqn].dtype}
        self.note()

    def reads_noted(self) -> AbstractContextManager[None]:
        """Note whose ``data`` is read by the user, who may write to it, and count writes to it in a step of stage 3."""
        return observed(nn.Parameter, "data", self._data_of, self._note_set)

    def _data_of(self, parameter: Tensor, data: Tensor) -> Tensor:
        if (fqn := self._fqns.get(id(parameter))) is None or user()[0] is None:
            return data
        if self._running.stage < 3:
            self._read.add(fqn)
        # Released ones are looked at (`WatchedUses`).
        return parameter.detach() if self._running.stage == 3 and self._running.inside else data

    def _note_set(self, parameter: Tensor, value: Tensor) -> bool:
        inside = self._running.stage == 3 and self._running.inside
        if inside and (fqn := self._fqns.get(id(parameter))) is not None and user()[0] is not None:
            self._set.add(fqn)
        return False

    def refuse_gathered(self, strategy: str) -> None:
        """ConfigurationError: the step of stage 3 that ends wrote to a parameter."""
        changed = (fqn for fqn, p in self._parameters.items() if version(p) != self._noted[fqn][0])
        if (fqn := next(iter(self._set), None) or next(changed, None)) is not None:
            raise _gathered_copy(f"The step writes to {fqn}", strategy)

    def note(self) -> None:
        """Say that the engine has put parameters where they are now, and written the masters."""
        self._masters = self._versions()
        self.note_places()

    def expect_writes(self) -> None:
        """Say that masters get values, on this rank or on others: until `note` all ranks take them for changed."""
        self._masters = []

    def note_places(self) -> None:
        """Say that the engine has put parameters where they are now."""
        self._noted = {fqn: (version(p), _memory(p)) for fqn, p in self._parameters.items()}

    def _versions(self) -> list[int]:
        """What changes with writes to masters; those to ``.data`` are counted too (`GradientUses`)."""
        return [version(group.flat) for group in self._running.groups]

    def stepped(self) -> None:
        self._steps += 1
        self.note()

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy what was written into the masters of stages 1 and 2, or to these into the parameters. All ranks call it.
        ConfigurationError: stage 3 has shards alone, or masters have more digits than what was written.
        """
        if self._masters != self._versions():
            # By the optimizer, outside of its step: those of ScheduleFree have values for training and for evaluation.
            refresh(self._running)
            self.note()
        touched = {fqn for fqn, p in self._parameters.items() if not self._is_as_noted(fqn, p)}
        read, self._read = self._read, set()
        compares = not self._rounds and (self._found or self._steps <= _COMPARED)
        if not touched and not read and not compares:
            return
        # Alike on all ranks, which run the same code.
        wrong = [fqn for fqn in sorted(touched) if self._running.stage == 3 or fqn in self._cast]
        pairs = list(self._pairs(touched | read, compares))
        for (fqn, own, kept), same in zip(pairs, _are_same(pairs), strict=True):
            if same:
                continue
            self._found = True
            if self._running.stage == 3 or kept.dtype != own.dtype:
                wrong.append(fqn)
            else:
                kept.copy_(own)
        # Ranks write to their own parts, and what one alone has written is not the optimizer's.
        self._masters = self._versions()
        if (read or self._steps <= _COMPARED) and (self._cast or self._running.stage == 3):
            # Each rank has compared its own part.
            wrong = [fqn for found in Ranks.of().gather(wrong) for fqn in found]
        if wrong:
            raise self._refused(wrong[0])
        if touched:
            self.note()

    def _is_as_noted(self, fqn: str, parameter: Tensor) -> bool:
        before, where = self._noted[fqn]
        return version(parameter) == before and (where is None or parameter.is_set_to(where))

    def _pairs(self, touched: set[str], everything: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
        """FQN, what forward sees of this rank's part of the parameter, and the value that lasts."""
        for fqn, start, part in self._kept():
            parameter = self._parameters[fqn]
            full = parameter.shape == layout.full_shape(parameter)
            if part.numel() and full and (everything or fqn in touched):
                yield fqn, parameter.detach().reshape(-1)[start : start + part.numel()], part

    def _kept(self) -> list[tuple[str, int, Tensor]]:
        """FQN of each parameter, and where this rank's part of the value that lasts begins, and that."""
        masters = [(m.fqn, m.start, part) for m, part in layout.shards(self._running.groups) if m.stepped]
        return masters + [(fqn, part.start, part.data) for fqn, part in self._values.kept.items()]

    def _refused(self, fqn: str) -> ConfigurationError:
        has = "shards of it" if self._running.stage == 3 else "copies of it in fewer digits"
        return ConfigurationError(
            f"{fqn} was written to between two steps (such as by clamp_, or to parameter.data), but ranks have {has} "
            "there, and what was written would be lost. Write with set_full_tensor(trainer, name, value), or use "
            "shard_ddp or shard_fsdp."
        )


def _are_same(pairs: Sequence[tuple[str, Tensor, Tensor]]) -> list[bool]:
    """Whether the two tensors of each have equal values, NaN too. Where they are on a device it is waited for once."""
    found = []
    for _, own, kept in pairs:
        there = kept.to(own.device, non_blocking=True).to(own.dtype)
        found.append(((own == there) | (own.isnan() & there.isnan())).all())
    return torch.stack(found).tolist() if found else []


def _gathered_copy(writes: str, strategy: str) -> ConfigurationError:
    return ConfigurationError(
        f"{writes}, but under {strategy} that is a gathered copy, which is freed with what was written. Write between "
        "steps with set_full_tensor(trainer, name, value), or use shard_ddp or shard_deepspeed_stage_2."
    )


def _memory(parameter: Any) -> Tensor | None:
    """Where a parameter lies, but for one that is gathered for the moment, whose memory is to be freed."""
    gathered = layout.is_partitioned(parameter) and parameter.shape == parameter.ds_shape
    return None if gathered and not parameter.ds_persist else parameter.detach()


_VIEWS = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
"""Functions whose result stands for the parameter."""

_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

_SIZES = (Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.size, Tensor.numel, Tensor.dim)  # type: ignore[attr-defined]

_HOOK = re.compile(r"\[(LightningModule|Callback)\].*\.on_\w+$")  # Lightning's name for the action of a hook.

_WATCHED = 8  # Steps that are looked at: the same code runs in the others, and each operator costs host time here.


class WatchedUses(TorchFunctionMode):
    """Raises where a step or a hook of stage 3 uses a released parameter, or writes to a gathered one."""

    def __init__(self, strategy: str, names: Callable[[], Mapping[Tensor, str]]) -> None:
        """``strategy`` is named in the messages, and ``names`` are those of the parameters."""
        super().__init__()
        self._names = names
        self._strategy = strategy
        self._paused, self._in_hook = False, 0
        self.gathered = False  # Whether a hook made the engine gather parameters, such as by a forward pass.
        self._views = WeakTensorKeyDictionary()
        self._steps = 0

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        self._steps += 1
        with self if self._steps <= _WATCHED else nullcontext():
            yield

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """DeepSpeed's own work on parameters."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def begins(self, action: str) -> None:
        """Look at a hook of the user, if ``action`` is Lightning's name of one."""
        if _HOOK.match(action):
            self._in_hook += 1
            self.__enter__()

    def ends(self, action: str) -> None:
        if _HOOK.match(action):
            self.__exit__(None, None, None)
            self._in_hook -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; ConfigurationError: it is one of the uses that can't be."""
        used = [] if self._paused else [base for each in _flat(args) if (base := self._base(each)) is not None]
        if used and self._in_hook and user()[0] is None:
            self.gathered, used = True, []
        if used and self._in_hook and func in _SIZES and not used[0].numel():
            # Lest code for matrices passes over them.
            return func(torch.empty(layout.full_shape(used[0]), device="meta"), *args[1:], **(kwargs or {}))
        if used and func not in _VIEWS and (_writes(func) or (self._in_hook and func == _SET_DATA)):
            self._refuse_write(func, used[0], next(iter(_flat(args))))
        released = not all(base.numel() for base in used)
        try:
            out = func(*args, **(kwargs or {}))
        except IndexError as error:
            raise not_gathered(self._strategy, self._user) if released else error from None
        if used and func in _VIEWS:
            self._views[out] = used[0]
        elif released and isinstance(out, Tensor):
            # ``weight.new_zeros(n)`` and ``x.to(weight)`` ask for a dtype and a device.
            name, of_first = func.__name__, self._base(args[0]) is not None
            if not (name.startswith("new_") if of_first else name in ("to", "type_as")):
                raise not_gathered(self._strategy, self._user)
        return out

    def _refuse_write(self, func: Callable[..., Any], parameter: Tensor, first: Any) -> None:
        if not parameter.numel():
            raise not_gathered(self._strategy, self._user)
        if self._base(first) is not None:
            writes = f"{self._user} writes to {self._names()[parameter]} with {func.__name__}"
            raise _gathered_copy(writes, self._strategy)

    @property
    def _user(self) -> str:
        return "A hook" if self._in_hook else "The step"

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
