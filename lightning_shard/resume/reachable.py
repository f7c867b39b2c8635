"""What objects hold, wherever it is: attributes, items, closures, and the globals that their functions name; among it
generators.
"""

import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
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


_SCALARS = (bool, int, float, str, type(None), np.generic)


def is_plain(value: Any) -> bool:
    """Whether it is made of numbers, texts, tensors and arrays alone."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if type(value) is dict:
        return all(map(is_plain, itertools.chain(value, value.values())))
    return all(map(is_plain, value)) if type(value) in (list, tuple) else isinstance(value, (*_SCALARS, torch.Tensor))
