"""Samples whose random numbers are seeded by the run's seed, the epoch and the sample's index."""

import hashlib
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from lightning_shard.resume import rng
from lightning_shard.resume.shape import Delegating


class SeededSamples(Delegating, Dataset[Any]):
    """Replaces a DataLoader's dataset. It seeds the global generators (Python's, numpy's and torch's on the CPU) before
    each sample, or with ``__getitems__`` before a batch by its indices. In a worker collating draws from them too. In
    the training process they are put back.
    """

    _own = frozenset({"_now"})

    def __init__(self, samples: Any, *, workers: bool) -> None:
        super().__init__(samples)
        now = torch.zeros(3, dtype=torch.int64)  # seed, epoch, iteration in the epoch
        self._now = now.share_memory_() if workers else now

    def seed_iteration(self, seed: int, epoch: int, cycle: int) -> None:
        """Seed samples for the ``cycle``-th iteration in an epoch from here on."""
        self._now.copy_(torch.tensor([seed, epoch, cycle]))

    def __getitem__(self, index: Any) -> Any:
        with rng.undrawn(device=False) if get_worker_info() is None else nullcontext():
            self._seed(index)
            return self._inner[index]

    def __getitems__(self, indices: Any) -> Any:
        """A batch's samples, also of a dataset that loads them one by one."""
        samples = self._inner
        while type(samples) is Subset:  # it has the method, but loads batches only if its dataset does
            samples = samples.dataset
        if not callable(getattr(samples, "__getitems__", None)):
            return [self[index] for index in indices]
        with rng.undrawn(device=False) if get_worker_info() is None else nullcontext():
            self._seed(indices)
            return self._inner.__getitems__(indices)

    def _seed(self, index: Any) -> None:
        key = index.tolist() if isinstance(index, torch.Tensor | np.ndarray) else index
        digest = hashlib.sha256(repr((*self._now.tolist(), key)).encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # torch.manual_seed seeds CUDA too, which no worker may touch.
        torch.default_generator.manual_seed(seed)
