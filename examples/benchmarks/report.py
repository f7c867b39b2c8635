"""A table, a CSV file and a picture of what was measured."""

from __future__ import annotations

import csv
import platform
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]


def environment(device: str) -> str:
    """When, on what and with which versions, in a line."""
    names = ("torch", "lightning", "deepspeed", "accelerate")
    versions = ", ".join(f"{name} {found}" for name in names if (found := _version(name)))
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"{when}, {device_name(device)}, Python {platform.python_version()}, {versions}"


def device_name(device: str) -> str:
    """Of the GPU, or how many cores there are."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{cpu_count()} CPU cores"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Lines of text, a row each; ``columns``: key in a row to its heading. What a row lacks is "-"."""
    cells = [list(columns.values()), *([_text(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


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

    Rows have ``race``, ``contestant`` and ``key``, and where it is known ``<key>_low`` and ``<key>_high``. The picture
    is as wide as a page shows it, 830 pixels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    races = list(dict.fromkeys(row["race"] for row in rows))
    figure, axis = pyplot.subplots(figsize=(8.3, 1.5 + 0.42 * len(races)), layout="constrained")
    axis.axvline(1, color="black", linewidth=1)
    kinds = {"other": ("C7", "stock Lightning or Accelerate"), "plain": ("C0", "plain"), "aligned": ("C1", "aligned")}
    for offset, (kind, (color, name)) in zip((-0.22, 0, 0.22), kinds.items(), strict=True):
        shown = [row for row in _not_first(rows) if _kind(row["contestant"]) == kind]
        values = [row[key] for row in shown]
        below = [value - row.get(f"{key}_low", value) for row, value in zip(shown, values, strict=True)]
        above = [row.get(f"{key}_high", value) - value for row, value in zip(shown, values, strict=True)]
        places = [races.index(row["race"]) + offset for row in shown]
        axis.errorbar(values, places, xerr=(below, above), fmt="o", color=color, markersize=5, capsize=2, label=name)
    axis.set_yticks(range(len(races)), races)
    axis.set_ylim(len(races) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(f"{label}; lower is better")
    figure.suptitle("\n".join(part for line in title.splitlines() for part in textwrap.wrap(line, 120)), fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _not_first(rows: Sequence[Row]) -> list[Row]:
    """All but each race's first row, which the others are compared with."""
    return [row for index, row in enumerate(rows) if any(row["race"] == earlier["race"] for earlier in rows[:index])]


def _kind(contestant: str) -> str:
    if not contestant.startswith("shard_"):
        return "other"
    return "aligned" if contestant.endswith("_aligned") else "plain"
