"""What users do to ``parameter.grad`` in a fit of stages 1 to 3, where it is None and DeepSpeed has the gradients.

Dropping them (``zero_grad``, ``parameter.grad = None``) is followed or refused, changes are refused, and what only
reads is told so. The flat masters in the groups are looked at too.
"""

import inspect
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType

from torch import Tensor, nn

from lightning_shard.engines.observed import observed, user
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import warn_on_first_rank
from lightning_shard.tensors.flat import FlatGroup

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
        self._masters = {id(group.flat): group.flat for group in groups}
        self._parameters = list(names)  # Else an id could become another's.
        self._fqns = {id(parameter): [fqn] for parameter, fqn in names.items()}
        self._fqns |= {id(group.flat): [m.fqn for m in group.members if m.stepped] for group in groups}
        self._readers: set[CodeType] = set()
        self._stepping = False

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Look at every use."""
        kinds = [(master, type(master)) for master in self._masters.values()]
        for master, _ in kinds:
            master.__class__ = nn.Parameter  # the class that is looked at
        try:
            with (
                observed(nn.Parameter, "grad", self._read, self._write),
                observed(nn.Parameter, "data", self._read_data, self._write_data),
            ):
                yield
        finally:
            for master, kind in kinds:
                master.__class__ = kind

    @contextmanager
    def stepping(self) -> Generator[None, None, None]:
        """The optimizer is at work, whose own the masters' gradients are."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _read(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        if self._stepping or (fqns := self._fqns.get(id(parameter))) is None:
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

    def _write(self, parameter: Tensor, value: Tensor | None) -> bool:
        fqns = None if self._stepping else self._fqns.get(id(parameter))
        if fqns is not None and (frame := user()[0]) is not None:
            if value is not None:
                raise self._lost(fqns[0], frame)
            self._drop(fqns)
        return False

    def _is_master(self, tensor: Tensor) -> bool:
        return id(tensor) in self._masters and user()[0] is not None

    def _read_data(self, tensor: Tensor, data: Tensor) -> Tensor:
        """``master.data``, whose changes are counted, so that forward gets to see them (`Written.take_over`)."""
        return tensor.detach() if self._is_master(tensor) else data

    def _write_data(self, tensor: Tensor, value: Tensor) -> bool:
        if is_master := self._is_master(tensor):
            # DeepSpeed and the checkpoint know it by its memory.
            tensor.detach().copy_(value)
        return is_master

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


def _changes_gradients(frame: FrameType) -> bool:
    """Whether the function's source writes to a gradient; so it is taken where there is no source."""
    try:
        return _CHANGE.search(inspect.getsource(frame.f_code)) is not None
    except (OSError, TypeError):
        return True
