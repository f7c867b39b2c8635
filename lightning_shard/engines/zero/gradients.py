"""What users do to ``parameter.grad`` in a fit of stages 1 to 3, where it is None and DeepSpeed has the gradients.

Dropping them (``zero_grad``, ``parameter.grad = None``) is followed or refused, changes are refused, and what only
reads is told so. While a fit lasts the class of parameters has a property for it, and that of the flat masters in the
groups.
"""

import inspect
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from lightning_shard.cluster.traces import package_of
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import warn_on_first_rank
from lightning_shard.tensors.flat import FlatGroup

_GRAD: Any = Tensor.grad  # the descriptors
_DATA: Any = Tensor.data

# An assignment to a gradient, or a method of it that works in place.
_CHANGE = re.compile(r"\.grad\b(\.data)?\s*([-+*/]?=(?!=)(?!\s*None\b)|\.\w+_\()")


class GradientUses:
    """Looks at the uses of gradients from `watch` on."""

    def __init__(
        self,
        strategy: str,
        names: Mapping[Tensor, str],
        groups: Sequence[FlatGroup],
        dropped: Callable[[str], None],
    ) -> None:
        """``names`` has what is stepped, ``groups`` the masters; ``dropped`` is told whose gradient goes."""
        self._strategy, self._dropped = strategy, dropped
        self._masters = [group.flat for group in groups]
        self._parameters = list(names)  # Else an id could become another's.
        self.fqns = {id(parameter): [fqn] for parameter, fqn in names.items()}
        self.fqns |= {id(group.flat): [m.fqn for m in group.members if m.stepped] for group in groups}
        self._readers: set[CodeType] = set()
        self._stepping = False

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Look at every use."""
        if not _watching:
            grad: Any = property(_read_grad, _write_grad, lambda p: _write_grad(p, None))
            nn.Parameter.grad = grad
        _watching.append(self)
        shown = type("Master", (nn.Parameter,), {"data": property(_read_data, _write_data)})
        kinds = [type(master) for master in self._masters]
        for master in self._masters:
            master.__class__ = shown
        try:
            yield
        finally:
            for master, kind in zip(self._masters, kinds, strict=True):
                master.__class__ = kind
            _watching.remove(self)
            if not _watching:
                del nn.Parameter.grad

    @contextmanager
    def stepping(self) -> Generator[None, None, None]:
        """The optimizer is at work, whose own the masters' gradients are."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def read(self, parameter: Tensor) -> Tensor | None:
        gradient: Tensor | None = _GRAD.__get__(parameter)
        if self._stepping or (fqns := self.fqns.get(id(parameter))) is None:
            return gradient
        frame, through = user()
        if frame is None:
            return gradient
        if "zero_grad" in through:
            self._drop(fqns)
        elif frame.f_code not in self._readers:
            self._refuse_change(fqns[0], frame, through)
        # A master may have one, of this rank's part.
        return None

    def write(self, parameter: Tensor, value: Tensor | None) -> None:
        fqns = None if self._stepping else self.fqns.get(id(parameter))
        if fqns is not None and (frame := user()[0]) is not None:
            if value is not None:
                raise self._lost(fqns[0], frame)
            self._drop(fqns)
        _GRAD.__set__(parameter, value)

    def _drop(self, fqns: Iterable[str]) -> None:
        for fqn in fqns:
            self._dropped(fqn)

    def _refuse_change(self, fqn: str, frame: FrameType, through: set[str]) -> None:
        if any("clip_grad" in function for function in through) or _changes_gradients(frame):
            raise self._lost(fqn, frame)
        self._readers.add(frame.f_code)
        warn_on_first_rank(
            f'{self._use(fqn, frame)}, here as anywhere. full_tensor(trainer, name, "gradient") gives it.'
        )

    def _use(self, fqn: str, frame: FrameType) -> str:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return f"{where} uses .grad of {fqn}, but under {self._strategy} it is None"

    def _lost(self, fqn: str, frame: FrameType) -> ConfigurationError:
        return ConfigurationError(
            f'{self._use(fqn, frame)}, and what is written to it is lost. Use full_tensor(trainer, name, "gradient") '
            "and set_full_tensor, Trainer(gradient_clip_val) or self.clip_gradients; or shard_ddp or shard_fsdp."
        )


_watching: list[GradientUses] = []  # of the engines that are there, which may end in any order


def _uses_of(parameter: Tensor) -> GradientUses | None:
    return next((uses for uses in _watching if id(parameter) in uses.fqns), None)


def _read_grad(parameter: Tensor) -> Tensor | None:
    return _GRAD.__get__(parameter) if (uses := _uses_of(parameter)) is None else uses.read(parameter)


def _write_grad(parameter: Tensor, value: Tensor | None) -> None:
    _GRAD.__set__(parameter, value) if (uses := _uses_of(parameter)) is None else uses.write(parameter, value)


def _read_data(master: Tensor) -> Tensor:
    """``master.data``, whose changes are counted, so that forward gets to see them (`Written.take_over`)."""
    data: Tensor = _DATA.__get__(master)
    return data if user()[0] is None else master.detach()


def _write_data(master: Tensor, value: Tensor) -> None:
    if user()[0] is None:
        _DATA.__set__(master, value)
    else:
        # DeepSpeed and the checkpoint know it by its memory.
        master.detach().copy_(value)


def user() -> tuple[FrameType | None, set[str]]:
    """The innermost frame that is not torch's, None where that is an engine's, and the functions inside of it, with
    that around a comprehension for it. Frames of the caller's own file do not count.
    """
    # A variable with this call's own frame would be a cycle: all callers' tensors would wait for garbage collection.
    frame, through = inspect.currentframe(), set[str]()
    frame = frame and frame.f_back
    file = frame and frame.f_code.co_filename
    while frame is not None and (
        frame.f_code.co_filename == file
        or package_of(frame) == "torch"
        or frame.f_code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
    ):
        through.add(frame.f_code.co_name)
        frame = frame.f_back
    own = frame is None or package_of(frame) in ("lightning_shard", "deepspeed")
    return None if own else frame, through


def _changes_gradients(frame: FrameType) -> bool:
    """Whether the function's source writes to a gradient; so it is taken where there is no source."""
    try:
        return _CHANGE.search(inspect.getsource(frame.f_code)) is not None
    except (OSError, TypeError):
        return True


class SteppedOnce:
    """Gradients of one optimizer: DeepSpeed drops them with the step, torch when ``zero_grad`` is called."""

    def __init__(self, fqns: Collection[str], is_pending: Callable[[], bool]) -> None:
        """``is_pending``: whether a backward pass ran since the last step."""
        self.fqns, self._is_pending = fqns, is_pending
        self._stepped: set[str] = set()

    def step(self) -> None:
        self._stepped = set(self.fqns)

    def drop(self, fqn: str) -> None:
        """Follow the user, who drops a gradient. ConfigurationError: it was not stepped on."""
        if self._is_pending():
            raise ConfigurationError(
                f"The gradient of {fqn} was dropped (zero_grad, parameter.grad = None) between a backward pass and the "
                "optimizer's step, but DeepSpeed has reduced it by then and can't drop it. Drop it after the step."
            )
        self._stepped.discard(fqn)

    def drop_all(self, set_to_none: bool = True) -> None:
        """The optimizer's ``zero_grad``; the memory that gradients are offloaded to must stay."""
        for fqn in self.fqns:
            self.drop(fqn)

    def check(self) -> None:
        """Refuse a backward pass or a step to which gradients of the last step belong."""
        if self._stepped:
            raise ConfigurationError(
                f"zero_grad was not called since the last step (of {min(self._stepped)}, for one): torch would add to "
                "that step's gradients, or step on them again, but DeepSpeed has dropped them. Call "
                "optimizer.zero_grad() after each step, or use shard_ddp or shard_fsdp."
            )
