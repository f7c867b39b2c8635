"""States of the generators and samplers that decide a loader's order, and a sampler that draws an epoch at once."""

import copy
import inspect
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_shard.resume import rng
from lightning_shard.resume.shape import Delegating, has_state, is_distributed, length_of, stock_type
from lightning_shard.tensors.tracing import tree_map


def to_saved(value: Any) -> Any:
    """A copy with arrays for numpy's numbers, whose types a checkpoint would lose."""
    return tree_map(lambda part: np.array(part) if isinstance(part, np.generic) else part, copy.deepcopy(value))


def from_saved(value: Any) -> Any:
    """A copy of the value that `to_saved` was given."""
    return tree_map(
        lambda part: part[()] if isinstance(part, np.ndarray) and not part.ndim else part, copy.deepcopy(value)
    )


class Generators:
    """The state of a loader's order: random number generators, and samplers with ``state_dict`` and
    ``load_state_dict``.
    """

    def __init__(self, loader: Any, samplers: list[Any]) -> None:
        found = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
        self._own = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        # A DistributedSampler's order follows from its epoch and seed, at any number of processes.
        self._stateful = [s for s in samplers if has_state(s) and not is_distributed(s)]

    def snapshot(self, *, common: bool = True) -> dict[str, Any]:
        """States of the samplers and of the generators: the loader's and its samplers' own, and if ``common`` the
        global ones (CPU).
        """
        states = [to_saved(sampler.state_dict()) for sampler in self._stateful]
        return self.generator_states(common=common) | {"states": states}

    def generator_states(self, *, common: bool = True) -> dict[str, Any]:
        own = {"generators": [one.get_state() for one in self._own]}
        return {"rng": rng.rng_state(device=False), **own} if common else own

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        if "rng" in snapshot:
            rng.set_rng_state(snapshot["rng"])
        for generator, state in zip(self._own, snapshot["generators"], strict=False):
            generator.set_state(state)
        for sampler, state in zip(self._stateful, snapshot.get("states", []), strict=False):
            sampler.load_state_dict(from_saved(state))


class IndexSource(Delegating):
    """Replaces a DataLoader's sampler or batch sampler `full`. It draws all samples of an epoch (batches of a custom
    batch sampler) at the first one, so that nothing else draws in between, and can run a planned iteration.
    """

    _own = frozenset({"full", "items", "order", "_late", "_planned"})

    def __init__(self, full: Any) -> None:
        super().__init__(full)
        stock = stock_type(full) is BatchSampler
        self.full, self.items = full, full.sampler if stock else full
        self.order: int | None = None  # A checksum of this rank's order of the epoch, if it was drawn at once.
        # torch's BatchSampler draws nothing before the first ``next``, torchdata's when its iterator is made.
        self._late = stock and inspect.isgeneratorfunction(type(full).__iter__)
        self._planned: Callable[[], Epoch] | None = None

    def epoch(self, start: int = 0, items: Any = None, share: "Share" = lambda order, start: order[start:]) -> "Epoch":
        """A new epoch: the ``share`` of ``items``, None for the source's own, after the position ``start``."""
        return Epoch(self, self.items if items is None else items, start, share, late=self._late)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch() if self._planned is None else self._planned()
        if self.items is self.full:
            return epoch
        batches = copy.copy(self.full)
        batches.sampler = epoch
        return iter(batches)

    def iterate(
        self, loader: Any, build: Callable[[], "Epoch"], generators: Generators, *, unseeded: bool
    ) -> Iterator[Any]:
        """An iterator of `loader`, which has this source, over the epoch ``build()``, drawn from `generators`. With
        workers torch makes the sampler's iterator twice, then draws their seed. `unseeded` puts generators back after
        that, as if persistent workers were still there.
        """
        latest: list[Epoch] = []
        after: list[dict[str, Any]] = []

        def planned() -> Epoch:
            if not (unseeded and latest):
                latest.append(build())
            if unseeded and not after:
                latest[-1].draw()
                after.append(generators.generator_states())
            return latest[-1]

        self._planned = planned
        try:
            batches = iter(loader)
            if not latest:
                # A subclass whose __iter__ is a generator has not reached the sampler yet.
                batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
            if latest:  # Draw now if nothing was drawn yet.
                latest[-1].draw()
                for snapshot in after:
                    generators.restore(snapshot)
        finally:
            self._planned = None
        return batches


Share = Callable[[list[Any], int], list[Any]]


class Epoch(Iterator[Any]):
    """One epoch of ``items``, all drawn at the first one if they have a length. With ``late`` their iterator is made
    then too.
    """

    def __init__(self, source: IndexSource, items: Any, start: int, share: Share, *, late: bool) -> None:
        self._source, self._all, self._start, self._share = source, items, start, share
        self._items: Iterator[Any] | None = None if late else iter(items)
        self._left: Iterator[Any] | None = None

    def draw(self) -> None:
        if self._left is not None:
            return
        length, items = length_of(self._all), iter(self._all) if self._items is None else self._items
        if length is None or type(self._all) is SequentialSampler:
            self._source.order = None
            deque(itertools.islice(items, self._start), maxlen=0)
            self._left = itertools.chain(list(itertools.islice(items, 1)), items)
            return
        order = list(itertools.islice(items, length + 1))  # and the epoch's end
        if length and not order:
            # The loaded state is from an epoch's end, with nothing left.
            items = iter(self._all)
            order = list(itertools.islice(items, length + 1))
        self._source.order = _checksum(self._share(order, 0))
        self._left = itertools.chain(self._share(order, self._start), items)

    def __next__(self) -> Any:
        self.draw()
        assert self._left is not None
        return next(self._left)


def _checksum(order: list[Any]) -> int:
    try:
        return zlib.crc32(array("q", order))
    except (TypeError, OverflowError):  # of batches, or other indices
        return zlib.crc32(repr(order).encode())
