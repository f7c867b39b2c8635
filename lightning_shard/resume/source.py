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


class IndexSource(Delegating):
    """In a DataLoader's place of the sampler or batch sampler `full`: the same, but for planned iterations."""

    _own = frozenset({"full", "_states", "_planned"})

    def __init__(self, full: Any, states: States) -> None:
        super().__init__(full)
        self.full, self._states = full, states
        self._planned: Callable[[], Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._states.watched(iter(self.full) if self._planned is None else self._planned())

    def iterate(
        self, loader: Any, build: Callable[[], Iterator[Any]], generators: Generators, *, unseeded: bool
    ) -> Iterator[Any]:
        """An iterator over `loader`, which has this source, of the indices that ``build()`` draws from `generators`.

        torch asks for them twice when it makes an iterator with workers, and draws the seed of the workers after that;
        `unseeded`: this is to leave no trace, because in an uninterrupted run the workers would still be there.
        """
        latest: list[_Peekable] = []
        after: list[Snapshot] = []

        def planned() -> Iterator[Any]:
            if not (unseeded and latest):
                latest.append(_Peekable(build()))
            if unseeded and not after:
                latest[-1].prime()
                after.append(generators.snapshot())
            return latest[-1]

        def settle() -> None:
            """Draw now what was not drawn yet."""
            latest[-1].prime()
            for snapshot in after:
                generators.restore(snapshot)

        self._planned = planned
        try:
            batches = iter(loader)
            if not latest:
                # A subclass whose __iter__ is a generator has not come to the sampler yet.
                batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
            if latest:
                settle()
        finally:
            self._planned = None
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
