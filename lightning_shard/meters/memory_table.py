"""Memory accounts as tables to read."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_shard.memory import KINDS, KindBytes, MemoryAccount
from lightning_shard.meters.throughput_summary import size_text
from lightning_shard.text import columns

PLACES = ("device", "host", "nvme")


def largest(accounts: Sequence[MemoryAccount]) -> int:
    """The rank with the most bytes on its device; among equals with the most in all places."""
    return max(range(len(accounts)), key=lambda rank: (accounts[rank].device.total, total(accounts[rank])))


def total(account: MemoryAccount) -> int:
    """Bytes in all places."""
    return sum(getattr(account, place).total for place in PLACES)


def memory_table(account: MemoryAccount, *, title: str, notes: Sequence[str] = ()) -> str:
    """An account with a line for each kind that it has, and a column for each place.

    Args:
        account: one rank's.
        title: the first line.
        notes: lines below the table.
    """
    places = [place for place in PLACES if place == "device" or getattr(account, place).total]
    rows = [("", *places)]
    for kind in KINDS:
        sizes = [getattr(getattr(account, place), kind) for place in places]
        if any(sizes):
            rows.append((kind, *(size_text(size) if size else "-" for size in sizes)))
    rows.append(("total", *(size_text(getattr(account, place).total) for place in places)))
    return "\n".join([title, columns(rows, numbers=True), *notes])


def to_numbers(account: MemoryAccount) -> list[int]:
    """The bytes of each kind in each place, for ranks to exchange."""
    return [getattr(getattr(account, place), kind) for place in PLACES for kind in KINDS]


def from_numbers(numbers: Sequence[int]) -> MemoryAccount:
    """What `to_numbers` gave."""
    kinds = [dict(zip(KINDS, numbers[i * len(KINDS) :], strict=False)) for i in range(len(PLACES))]
    parts = {place: KindBytes(**values) for place, values in zip(PLACES, kinds, strict=True)}
    return MemoryAccount(**parts)
