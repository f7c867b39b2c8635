"""Which parameters a step uses, agreed between ranks, so that every engine steps those that torch's DDP steps.

Under DDP with ``find_unused_parameters`` a parameter that no rank used has no gradient and is not stepped; one that
some ranks used has the average with zeros of the others. Engines that gather or reduce several parameters at once pair
the wrong ones where ranks use different ones, without an error as long as the sizes fit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_shard.engines.refusals import different_branches
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks

_COMPARED = 3
"""Steps in which ranks tell each other what they used. Later ones must use the same, or be told of always."""


class Usage:
    """The parameters that take part in each step."""

    def __init__(self, names: Iterable[str], *, always: bool = False) -> None:
        """Begin to look at ``names``; with ``always`` ranks tell each other in every step, which waits for all."""
        self._names = frozenset(names)
        self._used: set[str] = set()
        self._steps = 0
        self._last: list[Set[str]] = []
        self.varies = always
        """Whether ranks, or steps, differ in what they use, the same on every rank."""
        self.differs = False
        """Whether ranks do."""
        self.partly: Set[str] = frozenset()
        """What some rank did not use in the last step that ranks told of."""

    def watch(self, fqn: str, parameter: Tensor) -> Callable[[], None]:
        """Note the backward passes that reach ``parameter``; returns what ends that."""

        def note(gradient: Tensor) -> None:
            self._used.add(fqn)

        handle: Any = parameter.register_hook(note)
        return lambda: handle.remove()

    @property
    def settled(self) -> bool:
        """Whether all ranks are known to use the same parameters in each step."""
        return self._steps >= _COMPARED and not self.varies

    def finish(self, used: Iterable[str] = ()) -> Set[str]:
        """End a step; returns what no rank used, of what was noted and is in ``used``.

        All ranks call it; they communicate in the first steps, and where `varies`. ConfigurationError: this step uses
        others than the first ones, all of which used the same.
        """
        here = self._names - self._used.union(used)
        self._used.clear()
        if self.settled:
            if here != self._last[0]:
                changed = ", ".join(sorted(here ^ self._last[0]))
                raise ConfigurationError(
                    f"This step uses other parameters than the first {_COMPARED}: {changed}. Ranks have to tell each "
                    "other what they use then: set find_unused_parameters: true (ShardFSDPStrategy, ShardDDPStrategy)."
                )
            return here
        everywhere: list[Set[str]] = Ranks.of().gather(here)
        self._steps += 1
        self.differs |= any(each != everywhere[0] for each in everywhere)
        self.varies |= self.differs or bool(self._last and everywhere != self._last)
        self._last, self.partly = everywhere, frozenset().union(*everywhere)
        return frozenset.intersection(*map(frozenset, everywhere))


class SameUnits:
    """Refuses ranks that run different modules, each of which is gathered by all ranks together."""

    def __init__(self, units: Iterable[tuple[str, Any]]) -> None:
        """Look at the first steps of these modules, of which names are given."""
        self._inside, self._steps = False, 0
        # Before the engine's own hooks, which gather.
        self._hooks = [m.register_forward_pre_hook(self._entering(fqn), prepend=True) for fqn, m in units]

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*args: Any) -> None:
            if self._inside:
                self._meet(f"runs {name or 'the module itself'}")

        return enter

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """A forward pass. All ranks run it."""
        if not self._hooks:
            yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._meet("is at the end of the step's forward")
        self._steps += 1
        if self._steps == _COMPARED:
            self.close()

    def close(self) -> None:
        """Take the hooks off."""
        while self._hooks:
            self._hooks.pop().remove()

    def _meet(self, where: str) -> None:
        everywhere = Ranks.of().gather(where)
        if other := [rank for rank, each in enumerate(everywhere) if each != everywhere[0]]:
            raise different_branches(f"rank 0 {everywhere[0]}, rank {other[0]} {everywhere[other[0]]}")
