"""Write a plan as text: tables of bytes by kind, of engines and of traffic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_shard.engines.transforms import OFFLOAD, SELECTIVE, Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.memory import KINDS, MemoryAccount
from lightning_shard.planning.device_memory import DeviceMemory, Range, verdict
from lightning_shard.planning.step_memory import START, Point, peak
from lightning_shard.planning.step_time import StepTime
from lightning_shard.planning.traffic import Collective, Nodes
from lightning_shard.text import columns, show_bytes, show_seconds

FORMS: tuple[Checkpointing, ...] = (None, SELECTIVE, "units")
"""Compared forms of activation checkpointing, in order of recomputation."""

LARGEST_BATCH = 2**20  # The search for a batch ends here.

ON_CPU = "on CPUs tensors alone are counted, offloaded ones too: Python and its libraries take more"


_FORM = {SELECTIVE: "selective ", OFFLOAD: "offloaded "}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the comparison: an engine with one form of activation checkpointing."""

    name: str
    checkpointing: Checkpointing = None
    refused: str = ""  # Why the engine refuses this configuration. "": it does not.
    points: tuple[Point, ...] = ()
    needs: DeviceMemory = field(default_factory=partial(DeviceMemory, tensors=0))  # At the peak.
    cpu: bool = False  # Whether the devices are CPUs.
    traced: bool = True  # Whether ``points`` include activations.
    saved: int = 0  # Bytes that each rank writes in a save.
    largest_batch: Range | None = None  # Largest batch that fits, and that may fit. None: unknown.
    # Fewest devices that are enough, and that may be. None: no number is enough.
    fewest: tuple[Nodes | None, Nodes | None] = (None, None)
    sent: tuple[Collective, ...] = ()
    time: StepTime | None = None

    @property
    def title(self) -> str:
        if self.checkpointing is None:
            return self.name
        return f"{self.name} + {_FORM.get(str(self.checkpointing), '')}checkpointing"

    def verdict(self, memory: int) -> str:
        found = verdict(self.needs.bounds, memory)
        return found if self.traced or found == "does not fit" else "?"

    @property
    def most(self) -> MemoryAccount:
        """The account at the peak."""
        return peak(self.points, cpu=self.cpu).account

    @property
    def shown(self) -> str:
        return show_range(self.needs.bounds)


def show_range(sizes: Range) -> str:
    low, high = map(show_bytes, sizes)
    return low if low == high else f"{low} to {high}"


def describe_fit(row: Row, memory: int) -> str:
    """Say whether a row fits into ``memory`` bytes of a device, with the largest batch and the fewest devices."""
    told = row.verdict(memory)
    if row.traced:
        at = peak(row.points, cpu=row.cpu).name
        lines = [f"{told}: {row.shown} at the peak, in the {at}, of {show_bytes(memory)}"]
    else:
        told = told if told != "?" else "not known whether it fits"
        lines = [f"{told}: {row.shown} without activations, of {show_bytes(memory)}"]
    ranges = {"tensors": (row.needs.tensors,) * 2, **row.needs.overhead, "all": row.needs.bounds}
    rows = [["of a device at the peak", "at least", "at most"]]
    rows += [[name, show_bytes(low), show_bytes(high)] for name, (low, high) in ranges.items()]
    lines.append((ON_CPU if row.cpu else columns(rows, numbers=True)) + "\n")
    if row.largest_batch is not None:
        sure, may = row.largest_batch
        found = _sure_and(sure or "", f"up to {may} may fit" if may > sure else "", "none: not even 1 fits")
        lines.append(f"largest batch per device: {found}{' or more' * (sure == LARGEST_BATCH - 1)}")
    enough, maybe = ("" if each is None else f"{each.nodes} x {each.devices}" for each in row.fewest)
    found = _sure_and(enough, f"{maybe} may be enough" if maybe != enough else "", "no number of them is enough")
    lines.append(f"fewest devices for {'this batch' if row.traced else 'all but activations'}: {found}")
    saved = f"a save writes {show_bytes(row.saved)} per device, box by box"
    return "\n".join([*lines, f"{saved}, and in the background it needs as much pinned memory of the host"])


def advice(count: int, units: int, memory: int) -> str:
    """Advise against sharding if the states of ``count`` parameters are less than 1 % of ``memory``. Else ""."""
    states = 16 * count  # Parameters, gradients and Adam's two slots in fp32.
    if states * 100 > memory:
        return ""
    return (
        f"advice: use shard_ddp: {count:,} parameters with gradients and optimizer state need {show_bytes(states)}, "
        f"less than 1 % of a device, and sharded a step waits for collectives of each of its {units} shard units"
    )


def _sure_and(sure: object, may: str, nothing: str) -> str:
    return f"{sure or 'none for sure'}; {may}" if may else str(sure or nothing)


def by_kind(points: Sequence[Point]) -> str:
    """A table of one rank's bytes by kind at the peak of each part of the step. Host and NVMe have one line each."""
    parts = ((START,), ("forward",), ("backward", "reduction", "end of"), ("optimizer", "step"))
    found = [[p for p in points if p.name.startswith(part)] for part in parts]
    shown = [peak(matching) for matching in found if matching] or points
    rows = {kind: [getattr(p.account.device, kind) for p in shown] for kind in KINDS}
    rows["all"] = [p.account.device.total for p in shown]
    rows["host memory, per device"] = [p.account.host.total for p in shown]
    rows["NVMe, per device"] = [p.account.nvme.total for p in shown]
    table = [[title, *map(show_bytes, sizes)] for title, sizes in rows.items() if any(sizes) or title == "all"]
    return columns([["bytes of a device", *(p.name for p in shown)], *table], numbers=True)


def comparison(rows: Sequence[Row], memory: int, *, wide: bool = False) -> str:
    """A table with a line for each engine and form of checkpointing. ``wide`` adds all kinds of bytes at the peak."""
    planned = [row for row in rows if not row.refused]
    kinds = [kind for kind in KINDS if any(getattr(row.most.device, kind) for row in planned)]
    table, above = [], ""
    for row in planned:
        most, held = row.most, row.most.device
        cells = {"engine": f"  {row.title.removeprefix(above).strip()}" if row.name == above else row.title}
        above = row.name
        if wide:
            cells |= {**{kind: show_bytes(getattr(held, kind)) for kind in kinds}, "tensors": show_bytes(held.total)}
            cells["host"] = show_bytes(most.host.total + most.nvme.total)
        cells |= {"peak": row.shown, "fits": _FITS.get(row.verdict(memory), "?")}
        cells["batch"] = "?" if row.largest_batch is None else _ends(*row.largest_batch)
        if wide:
            ends = ("none" if each is None else each.ranks for each in reversed(row.fewest))
            cells["fewest devices"] = _ends(*ends)
        if any(other.time for other in planned):
            cells["step"] = show_seconds(row.time.expected) if row.time else "?"
            cells |= {"bound by": row.time.bound if row.time else "?"} if wide else {}
        table.append(cells)
    refused = [f"not planned: {row.title}: {row.refused}" for row in rows if row.refused]
    return "\n".join([columns([[*table[0]], *([*cells.values()] for cells in table)], numbers=True), *refused])


_FITS = {"fits": "yes", "may fit": "maybe", "does not fit": "no"}


def _ends(first: object, last: object) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def traffic(sent: Sequence[Collective], nodes: Nodes) -> str:
    if not sent:
        why = "there is one process" if nodes.ranks == 1 else "there are no parameters"
        return f"nothing crosses the network: {why}"
    rows = [["sent in a step", "axis", "ranks", "inside a node, per device", "between nodes, per node"]]
    bytes_of = [(c.inside(nodes), c.between(nodes)) for c in sent]
    for c, sizes in zip(sent, bytes_of, strict=True):
        rows.append([f"{c.kind}, {c.what}", c.axis, str(c.ranks), *map(show_bytes, sizes)])
    rows.append(["all", "", "", *(show_bytes(sum(sizes)) for sizes in zip(*bytes_of, strict=True))])
    return columns(rows, numbers=True)


def timing(time: StepTime) -> str:
    """The time of a step by resource, longest first. Waiting counts if compute does not hide it."""
    shown = sorted(time.parts.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in shown if seconds >= time.expected / 1000)
    links = f"{show_seconds(time.inside)} inside nodes and {show_seconds(time.between)} between nodes"
    return (
        f"a step takes about {show_seconds(time.expected)}, bound by {time.bound}: {spent}\n"
        f"traffic alone would take {links}. Compute hides the part that is not listed above"
    )


def recommend(rows: Sequence[Row], *, memory: int, nodes: Nodes) -> tuple[Row | None, str]:
    """The row to use with a reason, or None if nothing fits. ``rows`` have every form of activation checkpointing."""
    known = [row for row in rows if not row.refused]
    of = {verdict: [row for row in known if row.verdict(memory) == verdict] for verdict in ("fits", "?", "may fit")}
    fitting = next((rows for rows in of.values() if rows), [])
    if not fitting:
        least = min(known, key=lambda row: row.needs.bounds[0])
        fewest, needs = least.fewest[0], show_bytes(least.needs.bounds[0])
        more = "" if fewest is None else f", or {fewest.ranks} devices for {least.title}"
        return None, f"nothing fits; {least.title} needs least, {needs} per device: use a smaller batch{more}."
    best = min(fitting, key=lambda row: _cost(row, nodes))
    fits = "may fit" if fitting is of["may fit"] else "fits"
    without = " without activations" * (fitting is of["?"])
    reason = "it avoids offload and recomputation as far as possible, and then sends least"
    if best.time is not None:
        step = show_seconds(best.time.expected)
        reason = f"its step is as short as any, about {step}, without offload if possible"
    told = f"among those that {fits.removesuffix('s')}{without} ({len(fitting)} of {len(known)} forms), {reason}"
    need = f"It needs {best.shown} of {show_bytes(memory)} per device."
    return best, f"{best.title}, because {told}, on the simplest engine. {need}"


def _cost(row: Row, nodes: Nodes) -> tuple[Any, ...]:
    """The key of a comparison: offload, the time of a step, recomputation, bytes sent. Numbers with the same first two
    digits are equal. Rows are in order of simplicity, and the first of equals wins.
    """
    most = row.most
    offloaded = most.host.optimizer + most.nvme.optimizer > 0
    sent = (sum(c.between(nodes) for c in row.sent), sum(c.inside(nodes) for c in row.sent))
    time = row.time.expected if row.time else 0.0
    return (offloaded, _rounded(time), FORMS.index(row.checkpointing), *map(_rounded, sent))


def _rounded(number: float) -> float:
    return float(f"{number:.1e}")


def draw(rows: Sequence[Row], memory: int, path: Path) -> None:
    """Draw a bar of bytes by kind for each row, and a line at ``memory``, into a .png, .svg or .pdf file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot would keep state and may look for a screen.
    figure = Figure(figsize=(10, 1.5 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places, left = range(len(rows)), [0.0] * len(rows)
    for kind in KINDS:
        sizes = [getattr(row.most.device, kind) / 1e9 for row in rows]
        if any(sizes):
            axes.barh(places, sizes, left=left, label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(memory / 1e9, color="black", linestyle="--", label="a device's memory")
    axes.set_yticks(list(places), [row.title for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GB on a device at the peak of a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--picture {path} can't be written: {error}.") from error
