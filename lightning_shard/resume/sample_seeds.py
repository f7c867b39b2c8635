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
    """In a DataLoader's place of its dataset: the same, with the global generators (Python's, numpy's and torch's on
    the CPU) seeded ahead of each sample; with ``__getitems__``, ahead of a batch by its indices. In a worker that holds
    for collating too; in the training process the generators are as if nothing had been drawn.
    """

    _own = frozenset({"_now"})

    def __init__(self, samples: Any, *, workers: bool) -> None:
        super().__init__(samples)
        now = torch.zeros(3, dtype=torch.int64)  # seed, epoch, iteration in the epoch
        self._now = now.share_memory_() if workers else now

    def begin(self, seed: int, epoch: int, cycle: int) -> None:
        """Samples are of the ``cycle``-th iteration in an epoch from here on."""
        self._now.copy_(torch.tensor([seed, epoch, cycle]))

    def __getitem__(self, index: Any) -> Any:
        with rng.undrawn(device=False) if get_worker_info() is None else nullcontext():
            self._seed(index)
            return self._inner[index]

    def __getitems__(self, indices: Any) -> Any:
        """A batch's samples, for which a DataLoader asks, also of a dataset that loads them one by one."""
        samples = self._inner
        while type(samples) is Subset:  # which loads batches if its dataset does, whatever it says
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
