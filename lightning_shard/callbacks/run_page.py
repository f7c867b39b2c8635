"""One page that shows a run: its metrics over the steps, its memory, its checkpoints and restarts."""

import html
import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.arguments import checked
from lightning_shard.callbacks.memory import MemoryCallback
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.memory import memory_table
from lightning_shard.tensors.names import class_name
from lightning_shard.text import first_line, show_seconds

Points = list[tuple[int, float]]  # step and value

MOST_POINTS = 2000  # of a metric; then every second one goes
COLORS = ("#1f6feb", "#d1730a", "#2e8b57", "#b1359b", "#777777")
WIDTH, HEIGHT, LEFT = 440, 190, 70  # two beside each other in 1000 pixels
# Said by another metric already, or no curve.
LEFT_OUT = ("tokens/s_per_device", "samples/s_per_device", "memory/rank", "slowest/rank", "checkpoint_seconds", "epoch")


class RunPageCallback(Callback):
    """Writes one HTML file without scripts when a fit ends or fails: what was logged, over the optimizer steps.

    It shows whatever the module and other callbacks log: losses in one picture, and gradient norm, tokens per second,
    MFU and memory (of :class:`ThroughputCallback`) and each other metric in its own, with a tick for each checkpoint
    and a line where the run was resumed. What was seen goes into checkpoints, so that a resumed run, on whichever
    engine, shows the whole. Rank 0 writes; values are read from the device once in ``every_n_steps``.
    """

    @checked("RunPageCallback")
    def __init__(self, path: str | None = None, every_n_steps: int | None = None) -> None:
        """Say where the page is written and how often values are read.

        Args:
            path: the HTML file; default: ``run.html`` in the logger's folder, without one in ``default_root_dir``.
            every_n_steps: optimizer steps between two points; default: the Trainer's ``log_every_n_steps``.

        Raises:
            ConfigurationError: ``every_n_steps`` is less than 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}, but must be 1 or more.")
        self.path, self.every_n_steps = path, every_n_steps
        self.metrics: dict[str, Points] = {}
        self.marks: list[tuple[str, int]] = []
        self._seconds = 0.0
        self._file: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "marks": self.marks, "seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metrics, self.marks, self._seconds = (state_dict[key] for key in ("metrics", "marks", "seconds"))

    def _elapsed(self) -> float:
        return self._seconds + (time.monotonic() - self._started if self._file else 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # all ranks ask: it is broadcast
        self._file = Path(self.path or Path(folder) / "run.html")
        self._every = self.every_n_steps or trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        self._started, self._last = time.monotonic(), trainer.global_step
        if trainer.global_step:
            self.marks.append(("resumed", trainer.global_step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self._last + self._every:
            self._read(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self._file is not None:
            self._read(trainer)

    def _read(self, trainer: Trainer) -> None:
        self._last = trainer.global_step
        if not trainer.is_global_zero:
            return
        for name, value in trainer.callback_metrics.items():
            points = self.metrics.setdefault(name, [])
            number = float(value)
            # A metric stays among the Trainer's until it is logged again.
            if (not points or points[-1][1] != number) and name not in LEFT_OUT:
                points.append((trainer.global_step, number))
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
    """The HTML of a run; losses share a panel, and so do bytes."""
    panels: dict[str, dict[str, Points]] = {}
    for name, points in metrics.items():
        group = "loss" if "loss" in name else "memory, GiB" if name.endswith("_gib") else name
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        if finite:
            panels.setdefault(group, {})[name] = finite
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


def _panel(title: str, curves: dict[str, Points], marks: list[tuple[str, int]], ends: tuple[int, int]) -> str:
    values = [value for points in curves.values() for _, value in points]
    (first, last), low, high = ends, min(values), max(values)

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 12) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return 28 + (HEIGHT - 52) * ((high - value) / (high - low) if high > low else 0.5)

    bottom = HEIGHT - 22
    parts = [f'<path d="M{LEFT},22V{bottom}H{WIDTH - 8}" fill="none" stroke="#999"/>']
    for kind, step in marks:
        if first <= step <= last:
            line = f'x1="{x(step):.1f}" x2="{x(step):.1f}" y2="{bottom}"'
            saved, resumed = f'y1="{bottom - 6}" stroke="#888"', 'y1="24" stroke="#c22" stroke-dasharray="4"'
            look = saved if kind == "saved" else resumed
            parts.append(f"<line {line} {look}/>")
    for number, (name, points) in enumerate(sorted(curves.items())):
        color = COLORS[number % len(COLORS)]
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) < 25:
            parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5" fill="{color}"/>' for s, v in points]
        if len(curves) > 1:
            parts.append(f'<text x="{WIDTH - 8}" y="{14 + 12 * number}" text-anchor="end" fill="{color}">')
            parts.append(f"{html.escape(name)}</text>")
    for value in {low, high}:
        parts.append(f'<text x="{LEFT - 4}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for step, anchor in ((first, "start"), *([(last, "end")] if last > first else [])):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step}</text>')
    head = f'<text x="4" y="14" font-weight="bold">{html.escape(title)}</text>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{head}{"".join(parts)}</svg>'
