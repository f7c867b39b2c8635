"""A plan as text: tables of bytes by kind, of engines, of what crosses the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_shard.engines.transforms import SELECTIVE, Checkpointing
from lightning_shard.memory import KINDS, MemoryAccount
from lightning_shard.planning.largest_batch import shown_points
from lightning_shard.planning.quantities import show_bytes, show_seconds
from lightning_shard.planning.step_points import Point, peak
from lightning_shard.planning.traffic import Collective, Nodes, StepTime
from lightning_shard.text import columns

FORMS: tuple[Checkpointing, ...] = (None, SELECTIVE, "units")
"""The activation checkpointing that is compared, in the order of what is computed again."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine of a comparison."""

    name: str
    checkpointing: Checkpointing = None
    refused: str = ""  # Why the engine does not run this configuration; "": it does.
    points: tuple[Point, ...] = ()
    largest_batch: int | None = None
    fewest: Nodes | None = None
    sent: tuple[Collective, ...] = ()
    time: StepTime | None = None

    @property
    def title(self) -> str:
        """Name and activation checkpointing."""
        if self.checkpointing is None:
            return self.name
        return f"{self.name} + {'selective ' if self.checkpointing == SELECTIVE else ''}checkpointing"

    @property
    def most(self) -> MemoryAccount:
        """The account at the peak."""
        return peak(self.points).account


def fit(row: Row, memory: int) -> str:
    """Whether a row fits into ``memory`` bytes of a device, the largest batch that does, and the fewest devices."""
    at = peak(row.points)
    verdict = "fits" if at.account.device.total <= memory else "does not fit"
    lines = [f"{verdict}: {show_bytes(at.account.device.total)} at the peak, in the {at.name}, of {show_bytes(memory)}"]
    if row.largest_batch is not None:
        lines.append(f"largest batch per device: {row.largest_batch or 'none: not even 1 fits'}")
    fewest = "no number of them is enough" if row.fewest is None else f"{row.fewest.nodes} x {row.fewest.devices}"
    return "\n".join([*lines, f"fewest devices for this batch: {fewest}"])


def by_kind(points: Sequence[Point]) -> str:
    """Bytes of one rank's device by kind, at the peak of each part of the step; the host's and NVMe's below."""
    shown = shown_points(points)
    rows = [["bytes of a device", *(p.name for p in shown)]]
    for kind in KINDS:
        if any(getattr(p.account.device, kind) for p in shown):
            rows.append([kind, *(show_bytes(getattr(p.account.device, kind)) for p in shown)])
    rows.append(["all", *(show_bytes(p.account.device.total) for p in shown)])
    for place, title in (("host", "host memory, per device"), ("nvme", "NVMe, per device")):
        totals = [getattr(p.account, place).total for p in shown]
        if any(totals):
            rows.append([title, *(show_bytes(total) for total in totals)])
    return columns(rows, numbers=True)


def comparison(rows: Sequence[Row], memory: int) -> str:
    """A line for each engine: what its device holds at the peak, by kind, and whether that fits."""
    kinds = [kind for kind in KINDS if any(getattr(r.most.device, kind) for r in rows if not r.refused)]
    times = any(r.time for r in rows)
    head = ["engine", *kinds, "all", "host", "fits", "largest batch", "fewest devices"]
    table = [[*head, *(["step", "bound by"] if times else [])]]
    for row in rows:
        if row.refused:
            continue
        most = row.most
        outside = most.host.total + most.nvme.total
        cells = [row.title, *(show_bytes(getattr(most.device, kind)) for kind in kinds), show_bytes(most.device.total)]
        cells += [show_bytes(outside), "yes" if most.device.total <= memory else "no"]
        cells.append("?" if row.largest_batch is None else str(row.largest_batch))
        cells.append("none" if row.fewest is None else str(row.fewest.ranks))
        if times:
            cells += [show_seconds(row.time.expected), row.time.bound] if row.time else ["?", "?"]
        table.append(cells)
    refused = [f"not planned: {row.title}: {row.refused}" for row in rows if row.refused]
    return "\n".join([columns(table, numbers=True), *refused])


def traffic(sent: Sequence[Collective], nodes: Nodes) -> str:
    """What an optimizer step sends, by collective and mesh axis."""
    if not sent:
        return "nothing crosses the network: there is one process"
    rows = [["sent in a step", "axis", "ranks", "inside a node, per device", "between nodes, per node"]]
    for c in sent:
        inside, between = c.inside(nodes), c.between(nodes)
        rows.append([f"{c.kind}, {c.what}", c.axis, str(c.ranks), show_bytes(inside), show_bytes(between)])
    totals = [sum(c.inside(nodes) for c in sent), sum(c.between(nodes) for c in sent)]
    rows.append(["all", "", "", *(show_bytes(total) for total in totals)])
    return columns(rows, numbers=True)


def timing(time: StepTime) -> str:
    """The parts of a step and what it waits for."""
    return (
        f"a step takes about {show_seconds(time.expected)}, bound by {time.bound}: compute "
        f"{show_seconds(time.compute)}, links inside nodes {show_seconds(time.inside)}, between nodes "
        f"{show_seconds(time.between)}, each as if alone and communication behind compute"
    )
