"""The end of a run as a table, and its windows as a CSV to plot."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_shard.meters.throughput import Window
from lightning_shard.text import columns

COLUMNS = (
    "step", "steps", "devices", "step_seconds", "samples_per_second", "samples_per_second_per_device",
    "tokens_per_second", "tokens_per_second_per_device", "padding_share", "mfu", "data_share", "checkpoint_seconds",
    "grad_norm", "allocated", "reserved", "largest_rank",
)  # fmt: skip
"""The CSV's; of a `Window`, with bytes in ``allocated`` and ``reserved``. A value that is not known is empty."""


def write_csv(windows: Iterable[Window], path: Path) -> None:
    """One line for each window."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for window in windows:
            values = [getattr(window, column) for column in COLUMNS]
            writer.writerow(["" if value is None else value for value in values])


def summary_table(windows: Sequence[Window], *, blocked: float, on_cpu: bool) -> str:
    """Medians over windows and their spread, of all but the first window where there are more: it warms up.

    Args:
        windows: at least one.
        blocked: seconds that rank 0 spent in saving checkpoints.
        on_cpu: memory is the process's, and not a device's.
    """
    counted = windows[1:] or windows
    rows: list[tuple[str, ...]] = [("", "median", "10 %", "90 %")]
    for label, name, scale, form in (
        ("step time", "step_seconds", 1e3, "{:.1f} ms"),
        ("tokens/s", "tokens_per_second", 1, "{:,.0f}"),
        ("tokens/s/device", "tokens_per_second_per_device", 1, "{:,.0f}"),
        ("samples/s", "samples_per_second", 1, "{:,.1f}"),
        ("samples/s/device", "samples_per_second_per_device", 1, "{:,.1f}"),
        ("MFU", "mfu", 100, "{:.1f} %"),
        ("padding", "padding_share", 100, "{:.1f} %"),
        ("waiting for data", "data_share", 100, "{:.1f} %"),
        ("gradient norm", "grad_norm", 1, "{:.3g}"),
    ):
        values = [value * scale for window in counted if (value := getattr(window, name)) is not None]
        if values:
            rows.append((label, *(form.format(value) for value in _spread(values))))
    last = windows[-1]
    steps = sum(window.steps for window in counted)
    lines = [
        f"Throughput: {steps} optimizer steps in {len(counted)} windows, {last.devices} devices",
        columns(rows, numbers=True),
    ]
    lines.append(f"time blocked in checkpoints: {blocked:.1f} s")
    lines.append(f"{_memory(last, on_cpu=on_cpu)}, most on rank {last.largest_rank}")
    return "\n".join(lines)


def _memory(window: Window, *, on_cpu: bool) -> str:
    if on_cpu:
        return f"peak memory: {size_text(window.allocated)} resident"
    return f"peak memory: {size_text(window.allocated)} allocated, {size_text(window.reserved)} reserved"


def size_text(size: float) -> str:
    """Bytes as GiB, or in a smaller unit where they are few."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), deciles[0], deciles[-1]
