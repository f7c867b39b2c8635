"""The planner against published runs: the spread of its step times, its order of runs, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import quantiles
from typing import Any

from examples.benchmarks import report

NEAR = 0.2  # Of a published step, within which a predicted one should be.
SAME = 0.03  # Published throughputs within this are equal.


def spread(rows: Sequence[report.Row]) -> list[report.Row]:
    """Predicted by published step for each table, half and device, and whether the batch that ran fits in the plan."""
    found = []
    groups = dict.fromkeys((row["table"], row["half"], row["device"]) for row in rows if "step_ratio" in row)
    for group in groups:
        own = [r for r in rows if (r["table"], r["half"], r["device"]) == group and "step_ratio" in r]
        ratios = [row["step_ratio"] for row in own]
        low, middle, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
        verdicts = [row["fits"] for row in own if "fits" in row]
        fits = {f"{verdict}": verdicts.count(verdict) for verdict in ("fits", "may fit", "does not fit") if verdicts}
        row = {"table": group[0], "half": group[1], "device": group[2], "runs": len(own), "median": middle}
        found.append(
            {**row, "lower": low, "upper": high, "least": min(ratios), "most": max(ratios), "near": near} | fits
        )
    return found


SPREAD = {
    "table": "table",
    "device": "device",
    "half": "half",
    "runs": "steps",
    "median": "median",
    "lower": "quartile",
    "upper": "quartile",
    "least": "least",
    "most": "most",
    "near": f"within {NEAR:.0%}",
    "fits": "fits",
    "may fit": "may fit",
    "does not fit": "does not fit",
}


def kind_of(a: report.Row, b: report.Row) -> str:
    """The difference between two runs of one model and length."""
    if a["device"] != b["device"]:
        return "device"
    if a["setting"] != b["setting"]:
        return "recomputation, resharding, chunks or compilation"
    return "GPUs" if a["gpus"] != b["gpus"] else "batch"


def orders(rows: Iterable[report.Row]) -> tuple[list[report.Row], list[report.Row]]:
    """Of pairs of a table's runs of one model and length: how many are ordered as published, and those that are not."""
    timed = [row for row in rows if "step_ratio" in row]
    found: dict[tuple[str, str], list[int]] = {}
    wrong = []
    for a, b in combinations(timed, 2):
        if any(a[key] != b[key] for key in ("table", "series", "length")):
            continue
        published = a["tokens"] / b["tokens"]
        predicted = published * b["step_ratio"] / a["step_ratio"]
        if abs(published - 1) <= SAME:
            continue
        right = (published > 1) == (predicted > 1)
        counts = found.setdefault((a["table"], kind_of(a, b)), [0, 0])
        counts[0] += 1
        counts[1] += right
        if not right:
            wrong.append({"run": a["run"], "other": b["run"], "published": published, "predicted": predicted})
    return [{"table": t, "kind": kind, "pairs": n, "right": right} for (t, kind), (n, right) in found.items()], wrong


ORDERS = {"table": "table", "kind": "runs that differ in", "pairs": "pairs", "right": "as published"}
WRONG = {"run": "run", "other": "other", "published": "throughput", "predicted": "predicted"}
# Of each unit the title, the unit's name on the axes and the ticks.
PANELS: Mapping[str, tuple[str, str, list[int]]] = {
    "GiB": ("peak memory of a GPU", "GiB reserved", [7, 15, 30, 60, 90]),
    "samples": ("largest batch of a GPU", "samples", [5, 10, 20, 50, 100, 200]),
    "tokens": ("speed of a GPU", "tokens/s", [300, 1000, 3000, 10000, 30000, 100000]),
}
LABELS = {"fitted": "runs used to fit constants", "judged": "other runs"}


def _points(rows: Sequence[report.Row], unit: str) -> list[dict[str, Any]]:
    if unit != "tokens":
        return [dict(row) for row in rows if row.get("unit") == unit]
    timed = [row for row in rows if "step_ratio" in row]
    return [{**row, "published": row["tokens"], "predicted": row["tokens"] / row["step_ratio"]} for row in timed]


def draw(rows: Sequence[report.Row], path: Path) -> None:
    """Predicted against published memory, largest batches and speed, 830 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {unit: points for unit in PANELS if (points := _points(rows, unit))}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(8.3, 3.8), squeeze=False)
    for axis, (unit, points) in zip(axes[0], shown.items(), strict=True):
        near, (title, name, ticks) = NEAR if unit == "tokens" else 0.1, PANELS[unit]
        ends = [0.85 * min(row["published"] for row in points), 1.18 * max(row["published"] for row in points)]
        axis.plot(ends, ends, color="black", linewidth=0.8, label="equal")
        low, high = ([(1 + sign * near) * end for end in ends] for sign in (-1, 1))
        axis.fill_between(ends, low, high, color="grey", alpha=0.25, label="band")
        for half, marker, color in (("fitted", "s", "tab:blue"), ("judged", "o", "tab:orange")):
            own = [row for row in points if row["half"] == half]
            x, y = [row["published"] for row in own], [row["predicted"] for row in own]
            spans = [
                (r["predicted"] - r["low"], r["high"] - r["predicted"]) if unit != "tokens" else (0, 0) for r in own
            ]
            axis.errorbar(
                x,
                y,
                yerr=list(zip(*spans, strict=True)) if spans else None,
                fmt=marker,
                color=color,
                markersize=2.5 if len(points) > 50 else 4.5,
                elinewidth=0.9 if unit != "tokens" else 0,
                label=LABELS[half],
            )
        axis.set(xscale="log", yscale="log", xlabel=f"published, {name}", ylabel=f"planned, {name}")
        axis.set_title(f"{title}\nband: ±{near:.0%}", fontsize=10)
        for one in (axis.xaxis, axis.yaxis):
            one.set_ticks(ticks, [str(t) if t < 1000 else f"{t // 1000}k" for t in ticks])
            one.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="lower center", fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
