"""Data sets, loaders and states that the tests of resuming share."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)

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
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


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
