"""States of a rank's random number generators, as values for checkpoints."""

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.devices import accelerator, fork_rng, in_use

_LIBRARIES = ("torch", "torchdata", "lightning", "lightning_fabric")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def rng_state(*, device: bool = True) -> dict[str, Any]:
    """States of this process' generators as plain values and tensors: python's, numpy's, torch's on the CPU and, with
    ``device``, the current device's under its type, if one was used.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    # uint32 words in int64: torch tensors have no full uint32 support.
    keys64 = np.asarray(keys).astype(np.int64)
    state: dict[str, Any] = {
        # A tensor, not a list: a checkpoint has the words of all ranks, and each rank reads them all.
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(keys64), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device and in_use() and (kind := accelerator()) is not None:
        state[kind.type] = torch.get_device_module(kind).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states of :func:`rng_state` for generators that exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(torch.as_tensor(words).tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if (kind := accelerator()) is not None and kind.type in state:
        torch.get_device_module(kind).set_rng_state(state[kind.type].cpu())


@contextmanager
def undrawn(*, device: bool = True) -> Generator[None, None, None]:
    """Put the generators of :func:`rng_state` back afterwards, under fake tensors too."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with fork_rng(device=device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def same(first: Any, second: Any) -> bool:
    """Whether two states of generators or samplers are equal."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def derived_rng_seed(seed: int, rank: int, step: int) -> int:
    """A seed in ``[0, 2**32)`` for a rank that did not exist at the save, so that no two ranks share a stream."""
    digest = hashlib.sha256(f"lightning_shard/{seed}/{rank}/{step}".encode()).digest()
    # numpy accepts 32 bits.
    return int.from_bytes(digest[:4], "little")


def seed_rng(seed: int) -> None:
    """Seed all generators of :func:`rng_state` with `seed` in ``[0, 2**32)``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def of_library(cls: type) -> bool:
    """Whether a class is torch's or Lightning's own."""
    return cls.__module__.partition(".")[0] in _LIBRARIES


def generators_in(owner: Any, saved: str = "") -> list[str]:
    """Names of random number generators among a user's object's attributes, without the torch generator ``saved``."""
    held = {} if of_library(type(owner)) else getattr(owner, "__dict__", {})
    found = [name for name, value in held.items() if isinstance(value, _GENERATORS)]
    left = [name for name in found if name != saved or not isinstance(held[name], torch.Generator)]
    return [f"{type(owner).__name__}.{name}" for name in left]
