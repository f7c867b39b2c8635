"""What objects hold, wherever it is: attributes, items, closures, and the globals that their functions name; among it
generators, and numbers that change as samples are loaded.
"""

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_shard.resume import rng
from lightning_shard.tensors.names import unwrapped_modules

_MOST_OBJECTS, _OF_EACH = 10_000, 100
_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torchdata", "numpy", "deepspeed", "lightning", "pytorch_lightning", "lightning_shard"),
}
_OF_MODULES = vars(nn.Module()).keys()


def reachable(roots: Iterable[tuple[str, Any]], apart: Iterable[Any] = ()) -> Iterator[tuple[str, Any]]:
    """Path and value of what ``roots`` hold, each once, without the global generators and what is ``apart``: among
    attributes, also of classes, in closures, and among the globals that their functions name.
    """
    draws: list[Any] = [np.random.rand, random.random]
    seen = {id(one) for one in (torch.default_generator, *(draw.__self__ for draw in draws), *apart)}
    todo = list(roots)[::-1]
    while todo and len(seen) < _MOST_OBJECTS:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        with suppress(Exception):  # of code of what it is, which a save must not depend on
            leaf = isinstance(value, type | ModuleType | str | bytes | torch.Tensor | np.ndarray)
            if not leaf and rng.generator_kind(value) is None:
                todo += reversed(list(itertools.islice(_parts_of(path, value), _OF_EACH)))


def generators_of(*owners: Any) -> list[Any]:
    """The generators that datasets, collate functions and the transforms that they hold draw from."""
    return [value for _, value in reachable([("", owners)]) if rng.generator_kind(value) is not None]


def _parts_of(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, dict):
        held = dict.copy(owner)  # at once: another thread may change it
    elif isinstance(owner, partial):
        held = {"func": owner.func, **dict(enumerate(owner.args)), **owner.keywords}
    elif isinstance(owner, list | tuple | set | frozenset | deque):
        held = dict(enumerate(owner))
    elif isinstance(owner, FunctionType):
        held = closure(owner)
    elif isinstance(owner, MethodType | BuiltinMethodType):
        # Of its object what draws alone: a collate function may be the LightningModule's.
        bound = {"self": owner.__self__, **attributes(owner.__self__)}
        held = {name: value for name, value in bound.items() if rng.generator_kind(value) is not None}
        held["func"] = getattr(owner, "__func__", None)
    else:
        held = attributes(owner) | class_attributes(owner) | attributes(owner)  # Its own come first, and count.
    yield from ((f"{path}.{name}".lstrip("."), value) for name, value in held.items())
    if isinstance(owner, FunctionType):
        yield from named_globals(owner).items()


def attributes(owner: Any) -> dict[str, Any]:
    """Those that an object itself has, with or without a ``__dict__``."""
    declared = [vars(cls).get("__slots__", ()) for cls in type(owner).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    held = {name: getattr(owner, name) for name in slots if name != "__dict__" and hasattr(owner, name)}
    return held | getattr(owner, "__dict__", {})


def class_attributes(owner: Any) -> dict[str, Any]:
    """Those of its classes that no library has, functions among them."""
    classes = [cls for cls in reversed(type(owner).__mro__) if cls.__module__.partition(".")[0] not in _LIBRARIES]
    return {
        name: getattr(value, "__func__", getattr(value, "fget", value))  # of static and class methods and properties
        for cls in classes
        for name, value in vars(cls).items()
        if not name.startswith("__") or callable(value)
    }


def closure(function: FunctionType) -> dict[str, Any]:
    """What is in it, and the function's attributes."""
    held = dict(vars(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # It is empty yet.
            held[name] = cell.cell_contents
    return held


def named_globals(function: FunctionType) -> dict[str, Any]:
    """Those of a function that no library has, and what it names of modules among them, by module and name."""
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    found: dict[str, Any] = {}
    scopes = [(function.__module__ or "", function.__globals__)]
    for module, scope in scopes:
        if module.partition(".")[0] in _LIBRARIES:
            continue
        held = {f"{module}.{name}": scope[name] for name in names if name in scope}
        inner = [value for name, value in held.items() if name not in found and isinstance(value, ModuleType)]
        scopes += [(value.__name__, vars(value)) for value in inner]
        found |= held
    return found


def module_generators(module: nn.Module, others: Mapping[str, Any], apart: Iterable[Any] = ()) -> dict[str, Any]:
    """Name to generator of those that ``module`` and the modules in it, and ``others``, draw from and hold."""
    owners = list(unwrapped_modules(module))
    held = [
        (f"{path}.{name}".lstrip("."), value)
        for path, owner in owners
        for name, value in attributes(owner).items()
        if name not in _OF_MODULES
    ]
    found = {name: value for name, value in held if rng.generator_kind(value) is not None}
    classes = {type(owner): owner for _, owner in owners}
    code = [
        (f"{c.__name__}.{name}", value) for c, one in classes.items() for name, value in class_attributes(one).items()
    ]
    apart = [*apart, *found.values(), *(owner for _, owner in owners)]
    deeper = reachable([*code, *held, *others.items()], apart)
    return found | {path: value for path, value in deeper if rng.generator_kind(value) is not None}


def small_values(owner: Any) -> dict[str, Any]:
    """Attributes of ``owner`` that are plain values, or collections of a few, as `set_values` takes them."""
    return {
        name: _saved(value) for name, value in vars(owner).items() if _noted(value)[0] not in (*_LARGE, "generator")
    }


def set_values(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, rng.decoded(copy.deepcopy(value["value"])))


_SCALARS = (bool, int, float, str, type(None), np.generic)


def is_plain(value: Any) -> bool:
    """Whether it is made of numbers, texts, tensors and arrays alone."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if type(value) is dict:
        return all(map(is_plain, itertools.chain(value, value.values())))
    return all(map(is_plain, value)) if type(value) in (list, tuple) else isinstance(value, (*_SCALARS, torch.Tensor))


class Numbers:
    """Counters, and states of generators of one's own, that objects keep as plain values: data sets, their transforms
    and collate functions. Those of an object in which nothing else has changed can be read and written.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self._changing: dict[str, tuple[Any, str]] = {}  # Path to object and attribute of what `read` gave last.
        self._first = {path: now for path, _, now in self._noted()}

    def read(self, *, caches: bool = False) -> dict[str, Any]:
        """Path to value of each that is another than at first; "lost": the paths of those that can't be written, with
        ``caches`` also of collections that grew or shrank, in which there may be anything.
        """
        values: dict[str, Any] = {"lost": []}
        self._changing = {}
        for path, owner, now in self._noted():
            first = self._first.get(path, now)
            changed = [name for name, noted in now.items() if noted != first.get(name)]
            of_one_kind = [name for name in changed if _one_kind(now[name][0], first.get(name, now[name])[0])]
            same = [name for name in of_one_kind if now[name][0] not in _LARGE]
            own = {} if isinstance(owner, FunctionType) else attributes(owner)
            if same == changed and all(_last(name) in own and name in first for name in changed):
                values |= {name: _saved(own[_last(name)]) for name in changed}
                self._changing |= {name: (owner, _last(name)) for name in changed}
            else:
                lost = (_NUMBER, _KEPT, *[_CACHE] * caches)
                values["lost"] += [name for name in of_one_kind if now[name][0] in lost and name not in values["lost"]]
        return values

    def glance(self) -> dict[str, Any]:
        """Of what `read` gave last the values by now, for `read_then`; nothing else is looked at."""
        values = {}
        for path, (owner, name) in self._changing.items():
            value = getattr(owner, name, None)
            values[path] = owner, value if isinstance(value, _SCALARS) else copy.deepcopy(value)
        return values

    def read_then(self, glance: Mapping[str, Any], *, caches: bool = False) -> dict[str, Any]:
        """What `read` would have given at ``glance``; what only others than that knew have changed since is lost."""
        now = self.read(caches=caches)
        known = [path for path, (owner, _) in self._changing.items() if glance.get(path, (None,))[0] is owner]
        lost = [path for path in self._changing if path not in known]
        return {**{path: _saved(glance[path][1]) for path in known}, "lost": [*now["lost"], *lost]}

    def write(self, values: Mapping[str, Any]) -> None:
        """Set what `read` gave, in place where others may hold it too."""
        owners = dict(reachable(self._owners.items()))
        for path, value in values.items():
            owner, name = owners.get(path.rpartition(".")[0]), _last(path)
            if path == "lost" or owner is None:
                continue
            now, held = rng.decoded(copy.deepcopy(value["value"])), getattr(owner, name, None)
            if isinstance(held, dict):
                held.clear()
                held.update(now)
            elif isinstance(held, list):
                held[:] = now
            elif isinstance(held, torch.Tensor | np.ndarray) and held.shape == now.shape:
                held[...] = now
            else:
                object.__setattr__(owner, name, now)  # whatever the class makes of it, or refuses

    def _noted(self) -> Iterator[tuple[str, Any, dict[str, tuple[str, Any]]]]:
        """Path, owner, and path to kind and value of what it holds itself, of each object and function."""
        for path, owner in reachable(self._owners.items()):
            noted: dict[str, tuple[str, Any]] = {}
            with suppress(Exception):  # as there
                if isinstance(owner, FunctionType) or (attributes(owner) and not isinstance(owner, _APART)):
                    noted = {name: _noted(value) for name, value in _parts_of(path, owner)}
            if noted:
                yield path, owner, noted


_NUMBER, _KEPT, _CACHE, _OTHER = "number", "kept", "cache", "other"
_LARGE = (_KEPT, _CACHE, _OTHER)  # what is not saved
_APART = (type, ModuleType, MethodType, partial, torch.Tensor)
_CACHED = type(lru_cache(repr))
_FEW = 64  # Numbers of an array or a collection, above which it is not looked into.


def _one_kind(first: str, second: str) -> bool:
    """Whether two kinds are the same, or both of collections, which may have been smaller."""
    return first == second or {first, second} <= {_KEPT, _CACHE, "list", "dict"}


def _noted(value: Any) -> tuple[str, Any]:
    """Kind of a value, and what tells whether it has changed."""
    if isinstance(value, int | float | np.generic) and not isinstance(value, bool):
        return _NUMBER, repr(value)
    if isinstance(value, bool | str | None):
        return type(value).__name__, value
    if rng.generator_kind(value) is not None:
        return "generator", None  # It is saved as one.
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= _FEW:
        return _NUMBER, repr(value.tolist())
    if type(value) is np.ndarray and is_plain(value) and value.size <= _FEW:
        return _NUMBER, repr(value.tolist())
    if type(value) in (list, tuple, dict) and len(value) <= _FEW:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        if all(isinstance(part, _SCALARS) for part in parts):
            return type(value).__name__, repr(value)
    if isinstance(value, np.random.SeedSequence):
        return _KEPT, value.n_children_spawned
    if isinstance(value, itertools.count):
        return _KEPT, repr(value)
    if isinstance(value, list | deque) and value and isinstance(value[0], _SCALARS) and value[0] is not None:
        return _KEPT, len(value)
    if isinstance(value, list | dict | set | deque):
        return _CACHE, (len(value), value.count(None) if isinstance(value, list) else 0)
    if isinstance(value, _CACHED):
        return _CACHE, value.cache_info().currsize
    return _OTHER, id(value)


def _saved(value: Any) -> dict[str, Any]:
    return {"value": rng.encoded(copy.deepcopy(value))}


def _last(path: str) -> str:
    return path.rpartition(".")[2]
