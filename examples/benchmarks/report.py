"""A table, a CSV file and a picture of measurements."""

from __future__ import annotations

import csv
import platform
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count, getloadavg
from pathlib import Path
from typing import Any

import torch

from lightning_shard import devices
from lightning_shard.devices import cores

Row = Mapping[str, Any]


def environment(device: str) -> str:
    """Date, device and versions, in a line."""
    names = ("torch", "lightning", "deepspeed", "accelerate")
    versions = ", ".join(f"{name} {found}" for name in names if (found := _version(name)))
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{when}, {device_name(device)}, Python {platform.python_version()}, {versions}, {load()}"


def load() -> str:
    """The load of the machine by other programs."""
    return f"load {getloadavg()[0]:.1f} on {cores()} cores"


def device_name(device: str) -> str:
    """Of the GPU, or how many cores there are."""
    return f"{cpu_count()} CPU cores" if device == "cpu" else devices.name_of(torch.device(device))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Lines of text, a row each. ``columns``: key in a row to its heading. A missing value is "-"."""
    cells = [list(columns.values()), *([_text(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def markdown(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """The same as a table in Markdown."""
    cells = [list(columns.values()), *([_text(row.get(key)) for key in columns] for row in rows)]
    cells.insert(1, ["---", *["---:"] * (len(columns) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line for each row, under the keys of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)


def draw_ratios(rows: Sequence[Row], key: str, path: Path, *, title: str, label: str) -> None:
    """Ratios to each race's first contestant: a line for each race, a dot with its interval for each other contestant.

    Rows have ``race``, ``contestant`` and ``key``, and if known ``<key>_low`` and ``<key>_high``.
    """
    draw([{"rows": _not_first(rows), "key": key, "label": f"{label}; lower is better", "line": 1}], path, title=title)


def draw(panels: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Panels of dots, one below the other, in a picture that is as wide as a page shows it, 830 pixels.

    A panel has ``rows`` as `draw_ratios` takes them, ``key``, the axis' ``label`` and maybe a ``line`` to compare with.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    races = [list(dict.fromkeys(row["race"] for row in panel["rows"])) for panel in panels]
    heights = [0.8 + 0.42 * len(names) for names in races]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(8.3, 0.7 + sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, panel, names in zip(axes[:, 0], panels, races, strict=True):
        if panel.get("line") is not None:
            axis.axvline(panel["line"], color="black", linewidth=1)
        for offset, (kind, color) in zip((-0.3, -0.1, 0.1, 0.3), _KINDS.items(), strict=True):
            _dots(axis, panel, kind, lambda row, names=names, offset=offset: names.index(row["race"]) + offset, color)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel(panel["label"])
    figure.legend(*_legend(axes[:, 0]), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("\n".join(part for line in title.splitlines() for part in textwrap.wrap(line, 120)), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _not_first(rows: Sequence[Row]) -> list[Row]:
    """All but each race's first row, which the others are compared with."""
    return [row for index, row in enumerate(rows) if any(row["race"] == earlier["race"] for earlier in rows[:index])]


_KINDS = {"by hand": "black", "stock Lightning or Accelerate": "C7", "plain": "C0", "aligned": "C1"}


def _dots(axis: Any, panel: Mapping[str, Any], kind: str, place: Callable[[Row], float], color: str) -> None:
    """The dots of one kind of contestants, with their intervals."""
    key, rows = panel["key"], [row for row in panel["rows"] if _kind(row["contestant"]) == kind]
    if rows:
        values = [row[key] for row in rows]
        below = [value - row.get(f"{key}_low", value) for row, value in zip(rows, values, strict=True)]
        above = [row.get(f"{key}_high", value) - value for row, value in zip(rows, values, strict=True)]
        style = {"fmt": "o", "color": color, "markersize": 5, "capsize": 2, "label": kind}
        axis.errorbar(values, list(map(place, rows)), xerr=(below, above), **style)


def _legend(axes: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """Handles and labels, each kind once."""
    found = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    once = {label: handle for handle, label in reversed(found)}
    return [once[kind] for kind in _KINDS if kind in once], [kind for kind in _KINDS if kind in once]


def _kind(contestant: str) -> str:
    if contestant.startswith("shard_"):
        return "aligned" if contestant.endswith("_aligned") else "plain"
    return "stock Lightning or Accelerate" if contestant.startswith(("lightning_", "accelerate_")) else "by hand"
