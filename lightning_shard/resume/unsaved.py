"""Attributes that look as if they kept state, of objects without ``state_dict`` and ``load_state_dict``."""

import io
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from lightning_shard.resume.shape import has_state, of_library

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def generators_in(owner: Any) -> list[str]:
    """Names of the random number generators among an object's own attributes."""
    held = getattr(owner, "__dict__", {}).items()
    return [f"{type(owner).__name__}.{name}" for name, value in held if isinstance(value, _GENERATORS)]


class Unsaved:
    """What samplers and datasets seem to keep and no checkpoint has: generators and iterators among their own
    attributes, and numbers and texts that have changed.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._owners = [owner for owner in owners if not has_state(owner) and not of_library(type(owner))]
        self._first = [_values(owner) for owner in self._owners]

    def names(self) -> list[str]:
        """Class and attribute of each."""
        return [
            f"{type(owner).__name__}.{name}"
            for owner, first in zip(self._owners, self._first, strict=True)
            for name, value in getattr(owner, "__dict__", {}).items()
            if _goes_on(name, value) or first.get(name) != _values(owner).get(name)
        ]


def _goes_on(name: str, value: Any) -> bool:
    # A loader saves torch's generator of this name.
    saved = name == "generator" and isinstance(value, torch.Generator)
    iterates = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
    return not saved and (iterates or isinstance(value, _GENERATORS))


def _values(owner: Any) -> dict[str, Any]:
    """Numbers and texts, but the epoch, which the loop sets, and Lightning's notes."""
    told = {"epoch"} if hasattr(owner, "set_epoch") else set()
    return {
        name: value
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, bool | int | float | str | np.number) and name not in told and name[:5] != "__pl_"
    }
