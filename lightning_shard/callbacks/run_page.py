"""Write one page about a run: its metrics over the steps, its memory, its checkpoints and restarts."""

import html
import itertools
import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.arguments import checked
from lightning_shard.callbacks.memory_report import MemoryCallback
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.memory_account import memory_table
from lightning_shard.tensors.names import class_name
from lightning_shard.text import first_line, show_seconds

Points = list[tuple[int, float]]  # step and value

MOST_POINTS = 2000  # Per metric. Beyond it every second point is dropped.
COLORS = ("#1f6feb", "#d1730a", "#2e8b57", "#b1359b", "#777777")
LOG_FROM = 10  # The axis of losses is logarithmic if max / min is at least this.
WIDTH, HEIGHT, LEFT = 440, 190, 70  # Two panels fit into 1000 pixels.
# Redundant metrics, and metrics that are no curves.
LEFT_OUT = ("tokens/s_per_device", "samples/s_per_device", "memory/rank", "slowest/rank", "checkpoint_seconds", "epoch")


class RunPageCallback(Callback):
    """Writes one HTML file without scripts when a fit ends or fails, with all logged values over the optimizer steps.

    It shows all metrics of the module and of other callbacks: losses in one panel, and gradient norm, tokens per
    second, MFU and memory (of :class:`ThroughputCallback`) and each other metric in panels of their own. Checkpoints
    are ticks and restarts are lines. Checkpoints contain the values, so the page of a resumed run, on any engine, shows
    the whole run. Rank 0 writes the page. Values are read from the device every ``every_n_steps``.
    """

    @checked("RunPageCallback")
    def __init__(self, path: str | None = None, every_n_steps: int | None = None) -> None:
        """Set the page's path and interval.

        Args:
            path: the HTML file. Default: ``run.html`` in the logger's folder or else in ``default_root_dir``.
            every_n_steps: optimizer steps between two points. Default: the Trainer's ``log_every_n_steps``.

        Raises:
            ConfigurationError: ``every_n_steps`` is less than 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}, but must be 1 or more.")
        self.path, self.every_n_steps = path, every_n_steps
        self.metrics: dict[str, Points] = {}
        self.marks: list[tuple[str, int]] = []
        self._seconds = 0.0
        self._evaluated: set[str] = set()  # Metrics that only validations log.
        self._file: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "marks": self.marks, "seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metrics, self.marks, self._seconds = (state_dict[key] for key in ("metrics", "marks", "seconds"))

    def _elapsed(self) -> float:
        return self._seconds + (time.monotonic() - self._started if self._file else 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # Read on all ranks, because Lightning broadcasts it.
        self._file = Path(self.path or Path(folder) / "run.html")
        self._every = self.every_n_steps or trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        self._started, self._last = time.monotonic(), trainer.global_step
        if trainer.global_step:
            self.marks.append(("resumed", trainer.global_step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self._last + self._every:
            self._read(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self._file is not None:
            self._evaluated |= trainer.callback_metrics.keys() - self._before
            self._read(trainer, evaluated=True)

    def _read(self, trainer: Trainer, *, evaluated: bool = False) -> None:
        """Add a point to each curve. Metrics of a validation are read at its end only, though they stay there."""
        self._last = trainer.global_step
        if not trainer.is_global_zero:
            return
        for name, value in trainer.callback_metrics.items():
            if name in LEFT_OUT or (name in self._evaluated and not evaluated):
                continue
            points = self.metrics.setdefault(name, [])
            if points and points[-1][0] == trainer.global_step:
                points.pop()
            points.append((trainer.global_step, float(value)))
            if len(points) > MOST_POINTS:
                del points[1::2]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.marks.append(("saved", trainer.global_step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, "ended")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the page of a fit that failed or was stopped, with the error."""
        if self._file is not None:
            self._write(trainer, first_line(exception))

    def _write(self, trainer: Trainer, end: str) -> None:
        if not trainer.is_global_zero or self._file is None:
            return
        count = {kind: sum(mark == kind for mark, _ in self.marks) for kind in ("saved", "resumed")}
        facts = (
            f"{type(trainer.strategy).__name__}, {trainer.world_size} processes, {trainer.precision}: "
            f"{trainer.global_step} steps in {show_seconds(self._elapsed())}, {count['saved']} checkpoints, "
            f"{count['resumed']} restarts; {end}"
        )
        tables = [
            memory_table(c.measured, title="Memory of rank 0 in a step", predicted=c.predicted)
            for c in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(c, MemoryCallback) and c.measured is not None
        ]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(page(class_name(trainer.lightning_module), facts, self.metrics, self.marks, tables))
        rank_zero_info(f"page of the run: {self._file}")


def page(title: str, facts: str, metrics: dict[str, Points], marks: list[tuple[str, int]], tables: list[str]) -> str:
    """The HTML of a run. Losses share a panel, and bytes share one."""
    panels: dict[str, dict[str, Points]] = {}
    for name, points in metrics.items():
        group = "loss" if "loss" in name else "memory, GiB" if name.endswith("_gib") else name
        if any(math.isfinite(value) for _, value in points):
            panels.setdefault(group, {})[name] = points
    steps = [step for curves in panels.values() for points in curves.values() for step, _ in points]
    ends = (min(steps, default=0), max(steps, default=0))
    ordered = sorted(panels.items(), key=lambda panel: (panel[0] != "loss", panel[0]))
    drawn = "\n".join(_panel(name, curves, marks, ends) for name, curves in ordered)
    texts = "".join(f"<pre>{html.escape(table)}</pre>" for table in tables)
    return (
        f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>'
        "body{font:14px sans-serif;margin:24px}svg{margin:0 16px 16px 0}text{font-family:sans-serif;font-size:11px}"
        "</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(facts)}</p>\n"
        f"<p>x: optimizer steps; grey ticks: checkpoints; dashed: resumed</p>\n{drawn}\n{texts}</body></html>\n"
    )


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """At most seven round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 6)
    step = max(1.0, step) if whole else step
    return [number * step for number in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """At most nine ticks from ``low`` to ``high``: 1, 2 and 5 times powers of ten, or powers alone."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(powers) // 6)
    factors = (1, 2, 5) if len(powers) < 5 else (1,)
    ticks = [factor * 10.0**power for power in powers[::every] for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def _panel(title: str, curves: dict[str, Points], marks: list[tuple[str, int]], ends: tuple[int, int]) -> str:
    values = [value for points in curves.values() for _, value in points if math.isfinite(value)]
    (first, last), low, high = ends, min(values), max(values)
    # A loss falls fast at first and slowly later. A logarithmic axis shows both.
    logarithmic = title == "loss" and low > 0 and high / low >= LOG_FROM
    scale = math.log if logarithmic else float
    top, bottom = 28 + 12 * (len(curves) - 1), HEIGHT - 22 + 12 * (len(curves) - 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        share = (scale(high) - scale(value)) / (scale(high) - scale(low)) if high > low else 0.5
        return top + (bottom - 4 - top) * share

    parts = []
    for value in _log_ticks(low, high) if logarithmic else _ticks(low, high):
        parts.append(f'<path d="M{LEFT},{y(value):.1f}H{WIDTH - 8}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for step in _ticks(first, last, whole=True):
        parts.append(f'<path d="M{x(step):.1f},{bottom}v4" stroke="#999"/>')
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 15}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<path d="M{LEFT},{top - 6}V{bottom}H{WIDTH - 8}" fill="none" stroke="#999"/>')
    for kind, step in marks:
        if first <= step <= last:
            line = f'x1="{x(step):.1f}" x2="{x(step):.1f}" y2="{bottom}"'
            saved, resumed = f'y1="{bottom - 6}" stroke="#888"', f'y1="{top - 4}" stroke="#c22" stroke-dasharray="4"'
            parts.append(f"<line {line} {saved if kind == 'saved' else resumed}/>")
    for number, (name, points) in enumerate(sorted(curves.items())):
        color = COLORS[number % len(COLORS)]
        # A value that is not finite ends a line.
        for is_finite, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
            drawn = [(x(step), y(value)) for step, value in run if is_finite]
            line = " ".join(f"{across:.1f},{down:.1f}" for across, down in drawn)
            if len(drawn) > 1:
                parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            if len(points) < 25 or len(drawn) == 1:
                parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in drawn]
        if len(curves) > 1:
            parts.append(f'<text x="{WIDTH - 8}" y="{14 + 12 * number}" text-anchor="end" fill="{color}">')
            parts.append(f"{html.escape(name)}</text>")
    head = f"{html.escape(title)}{', logarithmic' * logarithmic}"
    head = f'<text x="4" y="14" font-weight="bold">{head}</text>'
    return f'<svg width="{WIDTH}" height="{bottom + 22}">{head}{"".join(parts)}</svg>'
