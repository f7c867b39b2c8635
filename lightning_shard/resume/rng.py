"""The random numbers of a rank: its generators as values that ``torch.load(weights_only=True)`` accepts, and samples
whose draws are seeded by the sample, or seen to be drawn.
"""

import copy
import hashlib
import itertools
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, get_worker_info

from lightning_shard.devices import accelerator, in_use
from lightning_shard.resume.shape import Delegating
from lightning_shard.tensors.names import unwrapped_modules
from lightning_shard.tensors.tracing import tree_map


def rng_state(*, device: bool = True) -> dict[str, Any]:
    """The generators of this process as plain values and tensors: python's, numpy's, torch's on the CPU and, if
    ``device`` is asked for and one was used, of the current device, under its type.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    # uint32 words; torch tensors have no full uint32 support, int64 holds them.
    keys64 = np.asarray(keys).astype(np.int64)
    state: dict[str, Any] = {
        # A tensor and not a list: a checkpoint has the words of all ranks, each of which reads them.
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(keys64), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device and in_use() and (kind := accelerator()) is not None:
        state[kind.type] = torch.get_device_module(kind).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set the generators that are here and in what :func:`rng_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(torch.as_tensor(words).tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if (kind := accelerator()) is not None and kind.type in state:
        torch.get_device_module(kind).set_rng_state(state[kind.type].cpu())


def derived_rng_seed(seed: int, rank: int, step: int) -> int:
    """A seed in ``[0, 2**32)`` for a rank that did not exist when the checkpoint was written: no shared streams."""
    digest = hashlib.sha256(f"lightning_shard/{seed}/{rank}/{step}".encode()).digest()
    # numpy accepts 32 bits.
    return int.from_bytes(digest[:4], "little")


def seed_rng(seed: int) -> None:
    """Seed all generators that :func:`rng_state` names; `seed` in ``[0, 2**32)``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


GENERATORS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[Any, int], Any]]] = {
    "torch": (torch.Generator, torch.Generator.get_state, torch.Generator.set_state, torch.Generator.manual_seed),
    "numpy": (
        np.random.Generator,
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
        lambda g, seed: setattr(g.bit_generator, "state", type(g.bit_generator)(seed).state),
    ),
    "legacy": (
        np.random.RandomState,
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
        lambda generator, seed: generator.seed(seed % 2**32),
    ),
    "bits": (
        np.random.BitGenerator,
        lambda generator: generator.state,
        lambda generator, state: setattr(generator, "state", state),
        lambda generator, seed: setattr(generator, "state", type(generator)(seed).state),
    ),
    "python": (random.Random, random.Random.getstate, random.Random.setstate, lambda g, seed: g.seed(seed % 2**32)),
}
"""Name to class, and functions that read a generator's state, set it, and seed it with 64 bits."""


_ARRAY = "numpy.ndarray"


def encoded(value: Any) -> Any:
    """``value`` with numpy's arrays and scalars as what ``torch.load(weights_only=True)`` accepts."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            data = torch.from_numpy(np.frombuffer(leaf.tobytes(), np.uint8).copy())
            return {_ARRAY: leaf.dtype.str, "shape": list(leaf.shape), "bytes": data}
        return leaf.item() if isinstance(leaf, np.generic) else leaf

    return tree_map(plain, value)


def decoded(value: Any) -> Any:
    """What `encoded` was given, but for numpy's scalars."""

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, dict):
            return leaf
        data = leaf["bytes"].numpy().tobytes()
        return np.frombuffer(data, dtype=np.dtype(leaf[_ARRAY])).reshape(leaf["shape"]).copy()

    return tree_map(array, value, is_leaf=lambda part: isinstance(part, dict) and _ARRAY in part)


def generator_state(generator: Any) -> dict[str, Any]:
    """Kind to state, in plain values and tensors alone."""
    kind = str(generator_kind(generator))
    return {kind: encoded(GENERATORS[kind][1](generator))}


def set_generator_state(generator: Any, saved: dict[str, Any]) -> bool:
    """Set the state that `generator_state` gave; False: it is of another kind."""
    [(kind, state)] = saved.items()
    try:
        GENERATORS[kind][2](generator, decoded(copy.deepcopy(state)))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


def _module_generators(module: nn.Module) -> dict[str, Any]:
    owners = unwrapped_modules(module)
    held = {f"{path}.{name}".lstrip("."): value for path, owner in owners for name, value in vars(owner).items()}
    return {name: value for name, value in held.items() if generator_kind(value) is not None}


def module_rng_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The states of the generators that ``module`` and the modules in it have as attributes, by name."""
    return {name: generator_state(generator) for name, generator in _module_generators(module).items()}


def load_module_rng_states(module: nn.Module, states: dict[str, dict[str, Any]]) -> list[str]:
    """Set what `module_rng_states` gave; the names of generators that are not there, or of another kind."""
    found = _module_generators(module)
    return [name for name, state in states.items() if not set_generator_state(found.get(name), state)]


def generator_kind(value: Any) -> str | None:
    """Its name in `GENERATORS`; None: it is no generator."""
    return next((kind for kind, (cls, *_) in GENERATORS.items() if isinstance(value, cls)), None)


_LOOKS = 64  # Samples of a worker process after which numbers that were drawn are not looked for any more.


class DrawingDataset(Delegating, Dataset[Any]):
    """In a DataLoader's place of a map-style dataset: the same, but for the random numbers that it draws.

    With `seeded`, the global generators (Python's, numpy's and torch's on the CPU) and the dataset's own are seeded
    ahead of each sample by run's seed, epoch and index; with ``__getitems__``, by the batch's indices. In a worker that
    holds for collating too; in the training process the global generators are as if nothing had been drawn. Without it,
    it is noted whether workers (where `workers` load samples) draw any; there `collate` may have generators too.
    """

    _own = frozenset({"_seeded", "_now", "_drawers", "_generators", "_looks", "_before"})

    def __init__(self, samples: Any, collate: Any, *, seeded: bool, workers: bool) -> None:
        super().__init__(samples)
        self._seeded, self._drawers = seeded, [samples, collate] if workers else [samples]
        now = torch.zeros(4, dtype=torch.int64)  # seed, epoch, iteration in the epoch, whether numbers were drawn
        self._now = now.share_memory_() if workers else now
        self._generators: list[Any] | None = None
        self._looks, self._before = 0, b""

    def begin(self, seed: int, epoch: int, cycle: int) -> None:
        """Samples are of the ``cycle``-th iteration in an epoch from here on."""
        self._now[:3] = torch.tensor([seed, epoch, cycle])

    @property
    def drawn(self) -> bool:
        """Whether random numbers of worker processes are neither seeded nor saved."""
        return bool(self._now[3])

    def __getitem__(self, index: Any) -> Any:
        with self._apart():
            return self._get(self._inner.__getitem__, index)

    def __getitems__(self, indices: Any) -> Any:
        """A batch's samples; what a DataLoader asks for, also of a dataset that loads them one by one."""
        with self._apart():
            if _loads_batches(self._inner):
                return self._get(self._inner.__getitems__, indices)
            return [self._get(self._inner.__getitem__, index) for index in indices]

    def _get(self, get: Callable[[Any], Any], index: Any) -> Any:
        first = self._generators is None
        generators = self._generators = generators_of(self._drawers) if self._generators is None else self._generators
        if self._seeded:
            key = index.tolist() if isinstance(index, torch.Tensor | np.ndarray) else index
            digest = hashlib.sha256(repr((*self._now[:3].tolist(), key)).encode()).digest()
            _seed(digest, generators)
        elif self._looks < _LOOKS and get_worker_info() is not None:
            self._look(generators)
        sample = get(index)
        if first and self._seeded and len(late := generators_of(self._drawers)) > len(generators):
            # Made when the first sample was asked for, which is drawn again.
            self._generators = late
            return self._get(get, index)
        return sample

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave the generators of the training process as they are; in a worker, collating follows the samples too."""
        if not self._seeded or get_worker_info() is not None:
            yield
            return
        before = rng_state(device=False)
        try:
            yield
        finally:
            set_rng_state(before)

    def _look(self, generators: list[Any]) -> None:
        """Compare the generators with those at this process' first sample."""
        own = [generator_state(generator) for generator in generators]
        state = pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy(), own))
        self._before = self._before or state
        self._looks += 1
        if state != self._before:
            self._now[3] = 1


def _loads_batches(dataset: Any) -> bool:
    # A Subset does if its dataset does, whatever it says.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


_MOST_HELD, _OF_EACH = 10_000, 100
_LIBRARIES = {
    *sys.stdlib_module_names,
    "torch",
    "torchdata",
    "numpy",
    "lightning",
    "pytorch_lightning",
    "lightning_shard",
}


def generators_of(owner: Any) -> list[Any]:
    """The generators that datasets, collate functions and the transforms that they hold draw from, but for the global
    ones: among attributes, also of classes, in closures, and among the globals that their functions name.
    """
    draws: list[Any] = [np.random.rand, random.random]
    everybodys = [torch.default_generator, *(draw.__self__ for draw in draws)]
    seen, found, todo = {id(one) for one in everybodys}, list[Any](), [owner]
    while todo and len(seen) < _MOST_HELD:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if generator_kind(value) is not None:
            found.append(value)
        elif not isinstance(value, type | ModuleType | str | bytes | torch.Tensor | np.ndarray):
            todo += reversed(list(itertools.islice(_held(value), _OF_EACH)))
    return found


def _held(owner: Any) -> Iterator[Any]:
    if isinstance(owner, dict):
        yield from owner.values()
    elif isinstance(owner, list | tuple | set | frozenset | deque):
        yield from owner
    elif isinstance(owner, partial):
        yield from (owner.func, *owner.args, *owner.keywords.values())
    elif isinstance(owner, FunctionType):
        yield from (*closure(owner), *_named_globals(owner))
    elif isinstance(owner, MethodType | BuiltinMethodType):
        # Of its object what draws alone: a collate function may be the LightningModule's.
        bound = owner.__self__
        yield from (value for value in (bound, *attributes(bound).values()) if generator_kind(value) is not None)
        yield getattr(owner, "__func__", None)
    else:
        yield from (*attributes(owner).values(), *class_attributes(owner).values())


def attributes(owner: Any) -> dict[str, Any]:
    """Those that an object itself has, with or without a ``__dict__``."""
    slots = [name for cls in type(owner).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    held = {name: getattr(owner, name) for name in slots if name != "__dict__" and hasattr(owner, name)}
    return held | getattr(owner, "__dict__", {})


def _names(slots: Any) -> Any:
    return [slots] if isinstance(slots, str) else slots


def class_attributes(owner: Any) -> dict[str, Any]:
    """Those of its classes that no library has, functions among them."""
    classes = [cls for cls in reversed(type(owner).__mro__) if cls.__module__.partition(".")[0] not in _LIBRARIES]
    return {
        name: getattr(value, "__func__", value)  # of static and class methods
        for cls in classes
        for name, value in vars(cls).items()
        if not name.startswith("__") or callable(value)
    }


def closure(function: FunctionType) -> list[Any]:
    """What is in it, and in the function's attributes."""
    held = list[Any](vars(function).values())
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # It is empty yet.
            held.append(cell.cell_contents)
    return held


def _named_globals(function: FunctionType) -> Iterator[Any]:
    """Of a function that no library has."""
    if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _seed(digest: bytes, generators: list[Any]) -> None:
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed seeds CUDA too, which no worker may touch.
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(generators, 1):
        own = int.from_bytes(hashlib.sha256(digest + bytes([number % 256])).digest()[:8], "little")
        GENERATORS[str(generator_kind(generator))][3](generator, own)
