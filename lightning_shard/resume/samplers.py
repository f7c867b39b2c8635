"""Samplers that go on in mid-epoch: what those of users keep between epochs (a ``state_dict`` of their own, or
generators and values as attributes), and the stand-in for a loader's that draws an epoch at once, or the rest of one.
"""

import copy
import inspect
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler

from lightning_shard.resume import rng
from lightning_shard.resume.reachable import attributes, generators_of, is_plain
from lightning_shard.resume.shape import Delegating, has_state, is_distributed, length_of, stock_type
from lightning_shard.tensors.tracing import tree_map

LARGEST = 2**20  # Bytes of an attribute that changes between epochs, above which it is not put into every checkpoint.

_SCALARS = (bool, int, float, str, type(None))
_VALUES = (*_SCALARS, torch.Tensor, list, tuple, dict, set, deque, np.ndarray, np.generic)
_SKIPPED = (Dataset, DataLoader, nn.Module, type, ModuleType)
_FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType)


class Attributes:
    """What changes in samplers without a ``state_dict`` as they are iterated over: generators, also of what they hold
    (but datasets and modules), and plain values that are not those of the beginning. Others are seen to have changed:
    plain values of what they hold, collections; iterators and functions that draw are taken to do so.
    """

    def __init__(self, samplers: Iterable[Any], dataset: Any) -> None:
        self._samplers = [sampler for sampler in samplers if not has_state(sampler)]
        self._dataset = dataset
        found = list(self._found())
        self._first = {path: _pickled(value) if isinstance(value, _VALUES) else b"" for path, _, _, value in found}

    def read(self) -> dict[str, Any]:
        """Path to value, which is plain; a generator's is its state. "lost": the paths of others that have changed."""
        values: dict[str, Any] = {"lost": []}
        for path, owner, _, value in self._found():
            if rng.generator_kind(value) is not None:
                values[path] = rng.generator_state(value)
            elif not isinstance(value, _VALUES):
                values["lost"].append(path)
            elif (now := _pickled(value)) != self._first.get(path):
                if not self._is_sampler(owner) or len(now) > LARGEST or not is_plain(value):
                    values["lost"].append(path)
                else:
                    values[path] = {"value": _kept(value)}
        return values

    def write(self, values: Mapping[str, Any]) -> None:
        """Set what `read` gave, and what it found unchanged to the values of the beginning."""
        for path, owner, name, value in self._found():
            if (
                path in values
                or path in values["lost"]
                or (isinstance(value, _SCALARS) and not self._is_sampler(owner))
            ):
                continue
            if path not in self._first:
                delattr(owner, name)
            elif self._first[path] and self._first[path] != _pickled(value):
                setattr(owner, name, pickle.loads(self._first[path]))
        owners = self._owners()
        for path, value in values.items():
            parent, _, name = path.rpartition(".")
            if parent not in owners:
                continue
            [(kind, state)] = value.items()
            if kind == "value":
                setattr(owners[parent], name, _given(state))
                continue
            generator = getattr(owners[parent], name, None)
            if rng.generator_kind(generator) != kind:
                generator = np.random.default_rng() if kind == "numpy" else rng.GENERATORS[kind][0]()
                setattr(owners[parent], name, generator)
            rng.set_generator_state(generator, value)

    def _is_sampler(self, owner: Any) -> bool:
        return isinstance(owner, Sampler) or any(owner is sampler for sampler in self._samplers)

    def _owners(self) -> dict[str, Any]:
        """Path to sampler, also one that another holds, or to another object that a sampler holds."""
        owners: dict[str, Any] = {}
        todo = [(f"{type(sampler).__name__}.{number}", sampler) for number, sampler in enumerate(self._samplers)]
        seen = {id(self._dataset)}
        while todo:
            path, owner = todo.pop(0)
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            owners[path] = owner
            if self._is_sampler(owner):
                held = [(f"{path}.{name}", value) for name, value in attributes(owner).items()]
                todo += [(name, value) for name, value in held if attributes(value) and not _is_kept(value)]
        return owners

    def _found(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Path, owner, name and value of each attribute that counts."""
        for path, owner in self._owners().items():
            values = _VALUES if self._is_sampler(owner) else _SCALARS
            for name, value in list(attributes(owner).items()):
                if value is self._dataset or _is_lightnings(owner, name):
                    continue
                draws = self._is_sampler(owner) and isinstance(value, _FUNCTIONS) and generators_of(value)
                counts = isinstance(value, values) or (self._is_sampler(owner) and hasattr(value, "__next__"))
                if rng.generator_kind(value) or counts or draws:
                    yield f"{path}.{name}", owner, name, value


def _is_lightnings(owner: Any, name: str) -> bool:
    """The epoch, which is the training loop's to set, or what Lightning notes of what a sampler was made with."""
    return (name == "epoch" and hasattr(owner, "set_epoch")) or name.startswith("__pl_")


def _is_kept(value: Any) -> bool:
    apart = isinstance(value, (*_VALUES, *_SKIPPED)) or rng.generator_kind(value) is not None
    return apart or has_state(value) or hasattr(value, "__getitem__")


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # of something that it holds
        return b""


def _kept(value: Any) -> Any:
    """A copy with arrays in the place of numpy's numbers, of which a checkpoint would not keep the types."""
    return tree_map(lambda part: np.array(part) if isinstance(part, np.generic) else part, copy.deepcopy(value))


def _given(value: Any) -> Any:
    """A copy of what `_kept` was given."""
    return tree_map(
        lambda part: part[()] if isinstance(part, np.ndarray) and not part.ndim else part, copy.deepcopy(value)
    )


class Generators:
    """What a loader's order can depend on: random number generators, the states of samplers that have ``state_dict``
    and ``load_state_dict``, and further attributes of the others.
    """

    def __init__(self, loader: Any, samplers: list[Any], dataset: Any) -> None:
        found = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
        self._own = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._attributes = Attributes(samplers, dataset)
        # What a DistributedSampler deals out follows from its epoch and seed, at any number of processes.
        self._stateful = [s for s in samplers if has_state(s) and not is_distributed(s)]

    def snapshot(self, *, common: bool = True) -> dict[str, Any]:
        """The states of the loader's and its samplers' own, and if ``common`` of the global ones (CPU)."""
        states = [_kept(sampler.state_dict()) for sampler in self._stateful]
        return self.drawn(common=common) | {"attributes": self._attributes.read(), "states": states}

    def drawn(self, *, common: bool = True) -> dict[str, Any]:
        """Of that the torch generators' alone."""
        own = {"generators": [one.get_state() for one in self._own]}
        return {"rng": rng.rng_state(device=False), **own} if common else own

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        if "rng" in snapshot:
            rng.set_rng_state(snapshot["rng"])
        for generator, state in zip(self._own, snapshot["generators"], strict=False):
            generator.set_state(state)
        if "attributes" in snapshot:
            self._attributes.write(snapshot["attributes"])
        for sampler, state in zip(self._stateful, snapshot.get("states", []), strict=False):
            sampler.load_state_dict(_given(state))


class IndexSource(Delegating):
    """In a DataLoader's place of the sampler or batch sampler `full`: the same, but an epoch's samples (of a batch
    sampler of its own kind: batches) are all drawn when the first is asked for, so that nothing else draws in between;
    and planned iterations.
    """

    _own = frozenset({"full", "items", "_late", "_planned"})

    def __init__(self, full: Any) -> None:
        super().__init__(full)
        stock = stock_type(full) is BatchSampler
        self.full, self.items = full, full.sampler if stock else full
        # torch's own draws nothing before the first ``next``, torchdata's when its iterator is made.
        self._late = stock and inspect.isgeneratorfunction(type(full).__iter__)
        self._planned: Callable[[], Epoch] | None = None

    def epoch(
        self, start: int = 0, items: Any = None, share: Callable[[list[Any]], list[Any]] | None = None
    ) -> "Epoch":
        """A new one, of the items after ``start``, or the ``share`` of all those of ``items``."""
        return Epoch(self.items if items is None else items, start, share, late=self._late)

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
        """An iterator over `loader`, which has this source, of the items of ``build()``, drawn from `generators`.
        torch asks twice for workers, then draws their seed; `unseeded`: without a trace, as if they were still there.
        """
        latest: list[Epoch] = []
        after: list[dict[str, Any]] = []

        def planned() -> Epoch:
            if not (unseeded and latest):
                latest.append(build())
            if unseeded and not after:
                latest[-1].draw()
                after.append(generators.drawn())
            return latest[-1]

        self._planned = planned
        try:
            batches = iter(loader)
            if not latest:
                # A subclass whose __iter__ is a generator has not come to the sampler yet.
                batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
            if latest:  # Draw now what was not drawn yet.
                latest[-1].draw()
                for snapshot in after:
                    generators.restore(snapshot)
        finally:
            self._planned = None
        return batches


class Epoch(Iterator[Any]):
    """Of what ``items`` give, all drawn at the first where they have a length; ``late``: they are asked then too."""

    def __init__(self, items: Any, start: int, share: Callable[[list[Any]], Any] | None, *, late: bool) -> None:
        self._all, self._start, self._share = items, start, share
        self._items: Iterator[Any] | None = None if late else iter(items)
        self._left: Iterator[Any] | None = None

    def draw(self) -> None:
        if self._left is not None:
            return
        length, items = length_of(self._all), iter(self._all) if self._items is None else self._items
        if length is None or type(self._all) is SequentialSampler:
            deque(itertools.islice(items, self._start), maxlen=0)
            self._left = itertools.chain(list(itertools.islice(items, 1)), items)
            return
        order = list(itertools.islice(items, length + 1))  # and the epoch's end
        if length and not order:
            # The state that was loaded is that of an epoch's end, of which nothing was left.
            items = iter(self._all)
            order = list(itertools.islice(items, length + 1))
        self._left = itertools.chain(order[self._start :], items) if self._share is None else iter(self._share(order))

    def __next__(self) -> Any:
        self.draw()
        assert self._left is not None
        return next(self._left)
