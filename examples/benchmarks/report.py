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


def ratio_panel(rows: Sequence[Row], key: str, labels: Sequence[str], title: str) -> Mapping[str, Any]:
    """A panel of `draw` with the ratios of ``rows``, and the intervals of their medians where they are known."""
    panel: dict[str, Any] = {"title": title, "labels": labels, "values": [row[key] for row in rows], "line": 1.0}
    if all(row.get(f"{key}_low") is not None for row in rows):
        panel["errors"] = [(row[key] - row[f"{key}_low"], row[f"{key}_high"] - row[key]) for row in rows]
    return panel


def draw(panels: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Panels of horizontal bars or of curves, one beside the other.

    A panel has a ``title``, and ``curves`` (each with ``label``, ``x``, ``y``), or bars: ``labels``, ``values``, and
    where wanted ``errors`` ((below, above) for each value), ``line`` (a value to compare with), ``start`` and ``end``
    (of the axis).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(len(panel.get("labels", range(14))) for panel in panels)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 1.4 + 0.27 * most), layout="constrained", squeeze=False
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        (_draw_curves if "curves" in panel else _draw_bars)(axis, panel)
        axis.set_title(panel["title"], fontsize=10)
        axis.set_axisbelow(True)
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, width=85 * len(panels))]
    figure.suptitle("\n".join(lines), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bars(axis: Any, panel: Mapping[str, Any]) -> None:
    labels, errors = panel["labels"], panel.get("errors")
    axis.barh(
        range(len(labels)),
        panel["values"],
        color=["C0" if label.strip().startswith(("shard_", "lightning_shard")) else "C7" for label in labels],
        height=0.7,
        xerr=None if errors is None else list(zip(*errors, strict=True)),
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
    if panel.get("line") is not None:
        axis.axvline(panel["line"], color="black", linewidth=1)
    if panel.get("start") is not None:
        axis.set_xlim(left=panel["start"], right=panel.get("end"))


def _draw_curves(axis: Any, panel: Mapping[str, Any]) -> None:
    names = list(dict.fromkeys(curve["label"] for curve in panel["curves"]))
    for index, curve in enumerate(panel["curves"]):
        # Curves of one name look alike, and stand in the legend once.
        first = all(other["label"] != curve["label"] for other in panel["curves"][:index])
        color = f"C{names.index(curve['label'])}"
        axis.plot(curve["x"], curve["y"], marker="o", color=color, label=curve["label"] if first else None)
    axis.legend(fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
