"""The engine that is recommended for a run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_shard.planning.quantities import show_bytes, show_seconds
from lightning_shard.planning.report import FORMS, Row
from lightning_shard.planning.traffic import Nodes


def recommend(rows: Sequence[Row], *, memory: int, nodes: Nodes) -> tuple[Row | None, str]:
    """The row to use, None where nothing fits, and why, in a sentence.

    Args:
        rows: engines with every form of activation checkpointing.
        memory: bytes of a device that the run may use.
        nodes: its machines.
    """
    known = [row for row in rows if not row.refused]
    fitting = [row for row in known if row.most.device.total <= memory]
    if not fitting:
        least = min(known, key=lambda row: row.most.device.total)
        more = "" if least.fewest is None else f", or {least.fewest.ranks} devices for {least.title}"
        return None, (
            f"nothing fits; {least.title} needs least, {show_bytes(least.most.device.total)} per device: use a smaller "
            f"batch{more}."
        )
    best = min(fitting, key=lambda row: _cost(row, nodes))
    return best, f"{best.title}, because {_reason(best, f'{len(fitting)} of {len(known)} forms fit', memory)}."


def _cost(row: Row, nodes: Nodes) -> tuple[Any, ...]:
    """What is compared, in this order: no offload, the time of a step or else what is sent, no recomputation."""
    most = row.most
    offloaded = most.host.optimizer + most.nvme.optimizer > 0
    sent = (sum(c.between(nodes) for c in row.sent), sum(c.inside(nodes) for c in row.sent))
    time = row.time.expected if row.time else 0.0
    return (offloaded, round(time, 6), FORMS.index(row.checkpointing), *sent, most.device.total)


def _reason(best: Row, count: str, memory: int) -> str:
    room = f"with {show_bytes(best.most.device.total)} of {show_bytes(memory)} per device"
    if best.time is not None:
        return (
            f"of what fits ({count}), without offload where that is possible, its step is the shortest, about "
            f"{show_seconds(best.time.expected)}, {room}"
        )
    return (
        f"of what fits ({count}) it keeps state on the device and computes nothing twice as far as that is possible, "
        f"and then sends least, {room}"
    )
