"""The random numbers that a dataset draws for a sample: seeded by the sample, or seen to be drawn."""

import hashlib
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from lightning_shard.resume.iterable import Delegating
from lightning_shard.resume.rng import GENERATORS, generator_kind, rng_state, set_rng_state

_LOOKS = 64  # Samples of a worker process after which numbers that were drawn are not looked for any more.


class DrawingDataset(Delegating, Dataset[Any]):
    """In a DataLoader's place of a map-style dataset: the same, but for the random numbers that it draws.

    With `seeded`, the global generators (Python's, numpy's and torch's on the CPU) and the dataset's own are seeded
    ahead of each sample by the run's seed, the epoch and the sample's index; of a dataset with ``__getitems__``, by the
    indices of the batch. In a worker that holds for what comes after the sample too, such as collating; in the training
    process the global generators are as if nothing had been drawn. Without it, it is noted whether workers (where
    `workers` load samples in other processes) draw any; there `collate` may have generators of its own too.
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
        if self._generators is None:
            self._generators = generators_of(self._drawers)
        if self._seeded:
            key = index.tolist() if isinstance(index, torch.Tensor | np.ndarray) else index
            digest = hashlib.sha256(repr((*self._now[:3].tolist(), key)).encode()).digest()
            _seed(digest, self._generators)
        elif self._looks < _LOOKS and get_worker_info() is not None:
            self._look()
        return get(index)

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

    def _look(self) -> None:
        """Compare the generators with those at this process' first sample."""
        state = pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))
        self._before = self._before or state
        self._looks += 1
        if state != self._before or self._generators:
            self._now[3] = 1


def _loads_batches(dataset: Any) -> bool:
    """Whether samples are loaded several at a time. A Subset does if its dataset does, whatever it says."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def generators_of(drawers: list[Any]) -> list[Any]:
    """The generators among the attributes of datasets and collate functions, and of the transforms that they hold."""
    return list(_generators(drawers, set()))


def _generators(owner: Any, seen: set[int], depth: int = 5) -> Iterator[Any]:
    if isinstance(owner, partial):
        held: Any = [owner.func, *owner.args, *owner.keywords.values()]
    elif isinstance(owner, MethodType):
        held = [value for value in vars(owner.__self__).values() if generator_kind(value) is not None]
    elif isinstance(owner, list | tuple):
        held = owner
    else:
        held = (owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})).values()
    for value in list(itertools.islice(held, 100)):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if generator_kind(value) is not None:
            yield value
        elif depth:
            yield from _generators(value, seen, depth - 1)


def _seed(digest: bytes, generators: list[Any]) -> None:
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed seeds CUDA too, which no worker may touch.
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(generators, 1):
        own = int.from_bytes(hashlib.sha256(digest + bytes([number % 256])).digest()[:8], "little")
        GENERATORS[str(generator_kind(generator))][3](generator, own)
