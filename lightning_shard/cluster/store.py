"""Requests to torch's store by thousands of ranks: many keys at a time, and waiting that asks nothing meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

_KEYS = 512  # of one request: one with 16,384 is never answered (torch 2.13)


def multi_get(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of keys that are all there."""
    return [value for part in _parts(keys) for value in store.multi_get(part)]


def multi_set(store: Store, keys: Sequence[str], value: str) -> None:
    """Give all keys one value."""
    for part in _parts(keys):
        store.multi_set(part, [value] * len(part))  # type: ignore[attr-defined]


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait for all keys to be there; those that are not in time."""
    deadline = time.monotonic() + seconds
    try:
        for part in _parts(keys):
            store.wait(part, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError:
        return [key for key in keys if not store.check([key])]
    return []


def _parts(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[first : first + _KEYS]) for first in range(0, len(keys), _KEYS)]
