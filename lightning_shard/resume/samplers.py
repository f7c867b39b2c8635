"""Samplers that go on in mid-epoch: what those of users keep between epochs (a ``state_dict`` of their own, or
generators and values as attributes), and the stand-in for a loader's that can yield the rest of an epoch once.
"""

import contextlib
import copy
import hashlib
import itertools
import pickle
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_shard.resume import rng
from lightning_shard.resume.draws import LOOKS, states_of
from lightning_shard.resume.reachable import attributes, class_attributes, closure, generators_of, is_plain
from lightning_shard.resume.shape import Delegating, has_state

LARGEST = 2**20  # Bytes of an attribute that changes between epochs, above which it is not put into every checkpoint.

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)
_VALUES = (*_PLAIN, list, tuple, dict, set, np.ndarray, np.generic)
_COLLECTIONS = (MutableMapping, MutableSequence, tuple, torch.Tensor, np.ndarray, np.generic)
_SKIPPED = (Dataset, DataLoader, nn.Module, type, ModuleType)


class Attributes:
    """What changes in samplers without a ``state_dict`` as they are iterated over: generators, also of what they hold
    (but datasets and modules), and plain values that are not those of the beginning. Of all else it is seen that it
    has changed.
    """

    def __init__(self, samplers: Iterable[Any], dataset: Any) -> None:
        self._samplers = [sampler for sampler in samplers if not has_state(sampler)]
        self._dataset = dataset
        found = list(self._found())
        self._first = {path: _pickled(value) if isinstance(value, _VALUES) else b"" for path, _, _, value in found}
        self._others = self._digests()

    def read(self) -> dict[str, Any]:
        """Path to value, which is plain; a generator's is its state. "lost": the paths of others that have changed."""
        values: dict[str, Any] = {"lost": []}
        for path, _, _, value in self._found():
            if rng.generator_kind(value) is not None:
                values[path] = rng.generator_state(value)
            elif not isinstance(value, _VALUES):
                values["lost"].append(path)  # an iterator
            elif (now := _pickled(value)) != self._first.get(path):
                if len(now) > LARGEST or not is_plain(value):
                    values["lost"].append(path)
                else:
                    values[path] = {"value": rng.encoded(copy.deepcopy(value))}
        values["lost"] += [path for path, digest in self._digests().items() if digest != self._others.get(path)]
        return values

    def write(self, values: Mapping[str, Any]) -> None:
        """Set what `read` gave, and what it found unchanged to the values of the beginning."""
        for path, owner, name, value in self._found():
            if path in values or path in values.get("lost", ()):
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
                setattr(owners[parent], name, rng.decoded(copy.deepcopy(state)))
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

    def _digests(self) -> dict[str, bytes]:
        """Path to digest of each attribute of a sampler, or of its classes, that `_found` does not give."""
        samplers = {path: owner for path, owner in self._owners().items() if self._is_sampler(owner)}
        # Of these `read` sees by itself what becomes.
        found = {
            p: value for p, *_, value in self._found() if not isinstance(value, _VALUES) or self._first.get(p, True)
        }
        apart = [self._dataset, *samplers.values(), *found.values()]
        return {
            f"{path}.{name}": _Digest(apart).of(value)
            for path, owner in samplers.items()
            for name, value in {**class_attributes(owner), **attributes(owner)}.items()
            if f"{path}.{name}" not in found and not _is_lightnings(owner, name)
        }

    def _found(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Path, owner, name and value of each attribute that counts: of what is no sampler generators alone."""
        for path, owner in self._owners().items():
            sampler = self._is_sampler(owner)
            for name, value in list(attributes(owner).items()):
                if value is self._dataset or _is_lightnings(owner, name):
                    continue
                counts = isinstance(value, _VALUES) or hasattr(value, "__next__")
                if rng.generator_kind(value) or (sampler and counts):
                    yield f"{path}.{name}", owner, name, value


def _is_lightnings(owner: Any, name: str) -> bool:
    """The epoch, which is the training loop's to set, or what Lightning notes of what a sampler was made with."""
    return (name == "epoch" and hasattr(owner, "set_epoch")) or name.startswith("__pl_")


class _Digest(pickle.Pickler):
    """Pickles a value to see whether it has changed: parts that can't be pickled as far as that goes, and neither those
    ``apart`` nor data sets, modules and what has a state of its own. Of functions their closures and the generators
    that they draw from count.
    """

    def __init__(self, apart: Iterable[Any]) -> None:
        self._digest = hashlib.sha256()
        super().__init__(SimpleNamespace(write=self._digest.update))
        self._apart = {id(one) for one in apart}

    def of(self, value: Any) -> bytes:
        with contextlib.suppress(Exception):  # of code of what it holds
            self.dump(value)
        return self._digest.digest()

    def reducer_override(self, value: Any) -> Any:
        if value is str:
            return NotImplemented
        indexed = hasattr(value, "__getitem__") and not isinstance(value, _COLLECTIONS)
        if id(value) in self._apart or isinstance(value, _SKIPPED) or indexed or has_state(value):
            return str, ("apart",)
        if type(value) is FunctionType:
            self._apart.add(id(value))  # It may name itself.
            return str, ([*generators_of(value), *closure(value).values()],)
        try:
            value.__reduce_ex__(4)
        except Exception:
            # Nobody knows how far an iterator is.
            return str, (secrets.token_hex(8) if hasattr(value, "__next__") else "unknown",)
        return NotImplemented


def _is_kept(value: Any) -> bool:
    return isinstance(value, (*_VALUES, *_SKIPPED)) or has_state(value) or hasattr(value, "__getitem__")


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # of something that it holds
        return b""


class States:
    """The samplers that have ``state_dict`` and ``load_state_dict``, with their states at each item of an epoch. On
    resume the items behind are drawn again from the state at the epoch's start; where that does not lead to the state
    that was saved (which may say how far the sampler is), the sampler is given this one.
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        # What a DistributedSampler deals out follows from its epoch and seed, at any number of processes.
        self._samplers = [s for s in samplers if has_state(s) and not isinstance(s, DistributedSampler)]
        self._start = self.read()
        self._consumed = deque([self._start], maxlen=2)  # After the last items that were given out.
        self._after: deque[Any] = deque()
        self._drawn, self._ended = 0, False

    def read(self) -> list[Any]:
        return [rng.encoded(copy.deepcopy(sampler.state_dict())) for sampler in self._samplers]

    def write(self, states: list[Any]) -> None:
        for sampler, state in zip(self._samplers, states, strict=False):
            sampler.load_state_dict(rng.decoded(copy.deepcopy(state)))

    def begin(self, saved: dict[str, Any] | None = None, drawn: int = 0) -> None:
        """An epoch's items are drawn from here on; or those after ``drawn`` of the epoch that was ``saved``."""
        if saved:
            self.write(saved["start"])
        self._start = saved["start"] if saved else self.read()
        self._consumed = deque([saved["consumed"] if saved else self._start], maxlen=2)
        self._after.clear()
        self._drawn, self._ended = drawn, False

    def watched(self, items: Iterator[Any]) -> Iterator[Any]:
        """``items``, each with a look at the samplers."""
        for item in items:
            self._drawn += 1
            self._after.append(self.read())
            yield item
        self._ended = True

    def consume(self) -> None:
        """The training loop was given one of the items that were drawn."""
        if self._after:
            self._consumed.append(self._after.popleft())

    def saved(self, ahead: int) -> dict[str, Any]:
        """At the epoch's start, after the last item trained on, and now; ``ahead``: given out since, 0 or 1."""
        if not self._samplers:
            return {}
        ends = {"start": self._start, "consumed": self._consumed[-1 - ahead], "now": self.read()}
        return ends | {"drawn": self._drawn, "ended": self._ended}

    def skip(self, saved: dict[str, Any], items: Iterable[Any], count: int) -> Iterator[Any]:
        """``items`` from the one after ``count`` on, with the samplers at the start of the epoch that was ``saved``."""
        iterator = iter(items)

        def skipped() -> Iterator[Any]:
            behind = sum(1 for _ in itertools.islice(iterator, count))
            if saved and (behind < count or not rng.same(self.read(), saved["consumed"])):
                self.write(saved["consumed"])
                yield from iter(items)
            else:
                yield from iterator

        return skipped()

    def finish(self, saved: dict[str, Any], items: Iterable[Any]) -> None:
        """Leave the samplers as the epoch that was ``saved`` left them."""
        self.write(saved["start"])
        deque(itertools.islice(items, saved["drawn"] + saved["ended"]), maxlen=0)
        if not rng.same(self.read(), saved["now"]):
            self.write(saved["now"])


class Generators:
    """What a loader's order can depend on: random number generators, and further attributes of its samplers."""

    def __init__(self, loader: Any, samplers: list[Any], dataset: Any) -> None:
        found = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
        self._own = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._attributes = Attributes(samplers, dataset)

    def snapshot(self, *, common: bool = True) -> dict[str, Any]:
        """The states of the loader's and its samplers' own, and if ``common`` of the global ones (CPU)."""
        own = {"generators": [one.get_state() for one in self._own], "attributes": self._attributes.read()}
        return {"rng": rng.rng_state(device=False), **own} if common else own

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        if "rng" in snapshot:
            rng.set_rng_state(snapshot["rng"])
        for generator, state in zip(self._own, snapshot["generators"], strict=False):
            generator.set_state(state)
        self._attributes.write(snapshot.get("attributes", {}))


class IndexSource(Delegating):
    """In a DataLoader's place of the sampler or batch sampler `full`: the same, but for planned iterations."""

    _own = frozenset({"full", "interleaved", "_states", "_planned"})

    def __init__(self, full: Any, states: States) -> None:
        super().__init__(full)
        self.full, self._states = full, states
        self.interleaved = False
        """Whether it was seen that items are drawn from the global generators after others have drawn from these."""
        self._planned: Callable[[], Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._looked(self._states.watched(iter(self.full) if self._planned is None else self._planned()))

    def _looked(self, items: Iterator[Any]) -> Iterator[Any]:
        """``items``, of the first of which `interleaved` is found out."""
        after = b""
        for _ in range(LOOKS):
            before = states_of([])
            item = list(itertools.islice(items, 1))
            drawn_before, after = after, states_of([])
            self.interleaved |= bool(drawn_before) and drawn_before != before != after
            if not item:
                return
            yield item[0]
        yield from items

    def iterate(
        self, loader: Any, build: Callable[[], Iterator[Any]], generators: Generators, *, unseeded: bool
    ) -> Iterator[Any]:
        """An iterator over `loader`, which has this source, of the indices that ``build()`` draws from `generators`.
        torch asks twice for workers, then draws their seed; `unseeded`: without a trace, as if they were still there.
        """
        latest: list[_Peekable] = []
        after: list[dict[str, Any]] = []

        def planned() -> Iterator[Any]:
            if not (unseeded and latest):
                latest.append(_Peekable(build()))
            if unseeded and not after:
                latest[-1].prime()
                after.append(generators.snapshot())
            return latest[-1]

        self._planned = planned
        try:
            batches = iter(loader)
            if not latest:
                # A subclass whose __iter__ is a generator has not come to the sampler yet.
                batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
            if latest:  # Draw now what was not drawn yet.
                latest[-1].prime()
                for snapshot in after:
                    generators.restore(snapshot)
        finally:
            self._planned = None
        return batches


class _Peekable:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._first: list[Any] | None = None

    def prime(self) -> None:
        if self._first is None:
            self._first = list(itertools.islice(self._iterator, 1))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.prime()
        assert self._first is not None
        return self._first.pop() if self._first else next(self._iterator)
