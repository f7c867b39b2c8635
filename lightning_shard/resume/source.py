"""The stand-in for a loader's sampler that can yield the rest of an epoch once, and the generators it draws from."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_shard.resume.iterable import Delegating
from lightning_shard.resume.rng import rng_state, set_rng_state
from lightning_shard.resume.samplers import Attributes, States

Snapshot = tuple[dict[str, Any], list[Any], dict[str, Any]]


class Generators:
    """What a loader's order can depend on: random number generators, and further attributes of its samplers."""

    def __init__(self, loader: Any, samplers: list[Any], dataset: Any) -> None:
        found = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
        unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
        self._own = list(unique.values())
        self._attributes = Attributes(samplers, dataset)

    def states(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Of the loader's and its samplers' own, not of the global ones."""
        return [generator.get_state() for generator in self._own], self._attributes.read()

    def set_states(self, states: list[torch.Tensor], attributes: dict[str, Any]) -> None:
        for generator, state in zip(self._own, states, strict=False):
            generator.set_state(state)
        self._attributes.write(attributes)

    def snapshot(self) -> Snapshot:
        """The global generators' state (CPU) and the loader's own."""
        return rng_state(device=False), *self.states()

    def restore(self, snapshot: Snapshot) -> None:
        set_rng_state(snapshot[0])
        self.set_states(*snapshot[1:])


class Plan:
    """What the next iterator over the indices gives, in place of a full epoch.

    torch asks for an iterator twice when it makes one with workers, and draws the seed of the workers after that;
    `build` gives the indices.

    Args:
        build: makes an iterator of indices.
        generators: what it draws from.
        unseeded: the drawing of a seed for the workers is to leave no trace, because in an uninterrupted run the
            workers would still be there.
    """

    def __init__(self, build: Callable[[], Iterator[Any]], generators: Generators, *, unseeded: bool) -> None:
        self._build, self._generators = build, generators
        self._unseeded = unseeded
        self._latest: _Peekable | None = None
        self._after: Snapshot | None = None

    def iterator(self) -> Iterator[Any]:
        if self._unseeded and self._latest is not None:
            return self._latest
        self._latest = _Peekable(self._build())
        if self._unseeded:
            self._latest.prime()
            self._after = self._generators.snapshot()
        return self._latest

    def settle(self) -> bool:
        """Draw now what was not drawn yet; whether an iterator had been asked for."""
        if self._latest is None:
            return False
        self._latest.prime()
        if self._after is not None:
            self._generators.restore(self._after)
        return True


class IndexSource(Delegating):
    """In a DataLoader's place of the sampler or batch sampler `full`: the same, but for one planned iteration."""

    _own = frozenset({"full", "_states", "_plan"})

    def __init__(self, full: Any, states: States) -> None:
        super().__init__(full)
        self.full, self._states = full, states
        self._plan: Plan | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._states.watched(iter(self.full) if self._plan is None else self._plan.iterator())

    def iterate(self, loader: Any, plan: Plan | None) -> Iterator[Any]:
        """An iterator over `loader`, which has this source, by `plan`."""
        self._plan = plan
        try:
            batches = iter(loader)
            if plan is not None and not plan.settle():
                # A subclass whose __iter__ is a generator has not come to the sampler yet.
                first = list(itertools.islice(batches, 1))
                plan.settle()
                batches = itertools.chain(first, batches)
        finally:
            self._plan = None
        return batches


class _Peekable:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._first: list[Any] | None = None

    def prime(self) -> None:
        """Have the first item drawn, if nothing was taken yet."""
        if self._first is None:
            self._first = list(itertools.islice(self._iterator, 1))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.prime()
        assert self._first is not None
        return self._first.pop() if self._first else next(self._iterator)
