"""Samples whose random numbers are seeded by the sample, or of which it is seen that workers draw for them."""

import hashlib
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from lightning_shard.resume import rng
from lightning_shard.resume.reachable import generators_of
from lightning_shard.resume.shape import Delegating

LOOKS = 64  # Samples after which it is not looked any more whether workers draw them.


class DrawingDataset(Delegating, Dataset[Any]):
    """In a DataLoader's place of a map-style dataset: the same, but for the random numbers that it draws.

    With `seeded`, the global generators (Python's, numpy's and torch's on the CPU) and the dataset's own are seeded
    ahead of each sample by run's seed, epoch and index; with ``__getitems__``, by the batch's indices. In a worker that
    holds for collating too; in the training process the global generators are as if nothing had been drawn. Without it,
    it is noted whether workers (where `workers` load samples) draw any; there `collate` may have generators too.
    """

    _own = frozenset({"_seeded", "_now", "_drawers", "_generators", "_held", "_looks", "_before"})

    def __init__(self, samples: Any, collate: Any, *, seeded: bool, workers: bool) -> None:
        super().__init__(samples)
        self._seeded, self._drawers = seeded, [samples, collate] if workers else [samples]
        # Seed, epoch, iteration in the epoch; whether numbers were drawn unseeded.
        now = torch.zeros(4, dtype=torch.int64)
        self._now = now.share_memory_() if workers else now
        self._generators: list[Any] | None = None
        self._held: list[int] = []  # How many references there are to each.
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
        samples = self._inner
        while type(samples) is Subset:  # which loads batches if its dataset does, whatever it says
            samples = samples.dataset
        with self._apart():
            if callable(getattr(samples, "__getitems__", None)):
                return self._get(self._inner.__getitems__, indices)
            return [self._get(self._inner.__getitem__, index) for index in indices]

    def _get(self, get: Callable[[Any], Any], index: Any) -> Any:
        first = self._generators is None
        if self._generators is None or any(map(operator.lt, _references(self._generators), self._held)):
            self._generators = generators_of(*self._drawers)  # The dataset may have put others in their place.
            self._held = _references(self._generators)
        generators = self._generators
        if self._seeded:
            key = index.tolist() if isinstance(index, torch.Tensor | np.ndarray) else index
            digest = hashlib.sha256(repr((*self._now[:3].tolist(), key)).encode()).digest()
            _seed(digest, generators)
        elif self._looks < LOOKS and get_worker_info() is not None:
            self._look(generators)
        sample = get(index)
        if first and self._seeded and len(late := generators_of(*self._drawers)) > len(generators):
            # Made when the first sample was asked for, which is drawn again.
            self._generators, self._held = late, _references(late)
            return self._get(get, index)
        return sample

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave the generators of the training process as they are; in a worker, collating follows the samples too."""
        with rng.undrawn(device=False) if self._seeded and get_worker_info() is None else nullcontext():
            yield

    def _look(self, generators: list[Any]) -> None:
        """Compare the generators with those at this process' first sample."""
        self._looks += 1
        state = states_of(generators)
        self._before = self._before or state
        self._now[3] |= state != self._before


def _references(values: list[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


def states_of(generators: list[Any]) -> bytes:
    """What tells whether the global generators or these are drawn from; no tensor is compared."""
    own = [state for generator in generators for state in rng.generator_state(generator).values()]
    own = [state.numpy() if isinstance(state, torch.Tensor) else state for state in own]  # pickled, it has its address
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy(), own))


def _seed(digest: bytes, generators: list[Any]) -> None:
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed seeds CUDA too, which no worker may touch.
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(generators, 1):
        own = int.from_bytes(hashlib.sha256(digest + bytes([number % 256])).digest()[:8], "little")
        rng.GENERATORS[str(rng.generator_kind(generator))][3](generator, own)
