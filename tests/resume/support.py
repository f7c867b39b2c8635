"""Data sets, loaders and states that the tests of resuming share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from lightning_shard.checkpoint.files.trainer_state import decode_state, encode_trainer_state
from lightning_shard.resume.wrap import resumable

SIZES = st.integers(1, 60)
WORLDS = st.integers(1, 5)


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def ids(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def through_file(state: Any) -> Any:
    """What a checkpoint makes of a state: it must load without running code."""
    return decode_state(encode_trainer_state({"state": state}), Path("trainer.pt"))["state"]


def distributed_loader(
    length: int, world_size: int, rank: int, *, batch_size: int = 2, epoch: int = 0, **options: Any
) -> Any:
    drop_last, drop_batch = options.pop("drop_last", False), options.pop("drop_batch", False)
    shuffle, seed = options.pop("shuffle", True), options.pop("seed", 3)
    dataset = Numbers(length)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    stock = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_batch, **options)
    loader = resumable(stock, world_size=world_size, rank=rank)
    loader.sampler.set_epoch(epoch)
    return loader


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class StatefulStream(Stream):
    """Goes on where its state says, and starts anew after its end."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state.get("position", 0)


class Own(Sampler[int]):
    """Samples in an order of its own; each subclass keeps another state."""

    length = 11

    def __len__(self) -> int:
        return self.length

    def order(self) -> list[int]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        yield from self.order()


class NumpyOwn(Own):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def order(self) -> list[int]:
        return [int(i) for i in self.rng.permutation(self.length)]


class InPlaceOwn(Own):
    """Shuffles its indices in place."""

    def __init__(self) -> None:
        self.indices = list(range(self.length))

    def order(self) -> list[int]:
        random.Random(1).shuffle(self.indices)
        return self.indices


class SeededState(Own):
    """Its state says what an epoch's order is drawn from, and nothing of the position."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.MT19937(5))

    def order(self) -> list[int]:
        return [int(i) for i in self.rng.permutation(self.length)]

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class PositionState(Own):
    """Its state says how far it is in which epoch; an epoch that has ended is followed by the next."""

    epoch, position = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield (7 * self.position + self.epoch) % self.length
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class YieldedState(Own):
    """As torchdata's distributed sampler: the state at an epoch's end stays until the next begins."""

    epoch, yielded, skip = 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.skip = self.skip, 0
        for index in range(self.yielded, self.length):
            self.yielded += 1
            yield (7 * index + self.epoch) % self.length

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["yielded"]
