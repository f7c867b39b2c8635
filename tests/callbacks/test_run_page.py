"""The page of a run: all that was logged, over restarts, and also of a fit that fails."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_shard.callbacks import MemoryCallback, RunPageCallback, ThroughputCallback
from lightning_shard.callbacks.run_page import MOST_POINTS, page
from lightning_shard.errors import ConfigurationError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


class Logs(TinyLM):
    fails_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise ValueError("a <bad> sample")
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        self.log("lr/first", 0.5)
        return loss


def _fit(strategy: str, steps: int, path: str, resume: str | None = None, fails_at: int = -1) -> RunPageCallback:
    seen = RunPageCallback(path, every_n_steps=1)
    callbacks = [seen, ThroughputCallback(every_n_steps=2, csv=f"{path}.csv"), MemoryCallback()]
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, callbacks=callbacks, gradient_clip_val=1.0)
    module = Logs()
    module.fails_at = fails_at
    trainer.fit(module, loader(), loader(count=4, shuffle=False), ckpt_path=resume)
    trainer.save_checkpoint(f"{path}.ckpt")
    return seen


def _in_two_parts(strategy: str, folder: str) -> dict[str, Any]:
    _fit("shard_ddp", 3, f"{folder}/first")
    seen = _fit(strategy, 6, f"{folder}/run.html", f"{folder}/first.ckpt")
    with pytest.raises(ValueError, match="a <bad> sample"):
        _fit(strategy, 6, f"{folder}/failed.html", fails_at=4)
    return {"metrics": seen.metrics, "marks": seen.marks}


@pytest.mark.parametrize("strategy", sampled(["shard_fsdp", "shard_deepspeed_stage_2"], 0))
def test_a_page_shows_the_whole_of_a_run(strategy: str, tmp_path: Path) -> None:
    first, second = run_distributed(_in_two_parts, 2, strategy, str(tmp_path))
    assert [step for step, _ in first["metrics"]["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert first["marks"] == [("saved", 3), ("resumed", 3), ("saved", 6)]
    assert set(second["metrics"]) <= set(first["metrics"]), "what rank 1 has, it read from the checkpoint"
    text = (tmp_path / "run.html").read_text()
    assert "<title>Logs</title>" in text, "not the class that FSDP puts in front"
    assert "6 steps in" in text
    assert "1 restarts; ended" in text
    titles = re.findall(r'font-weight="bold">([^<]*)<', text)
    assert titles[0] == "loss"
    assert {"loss", "grad_norm", "lr/first", "memory, GiB", "tokens/s"} <= set(titles)
    assert len(titles) == len(set(titles))
    assert "Memory of rank 0 in a step" in text
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)
    failed = (tmp_path / "failed.html").read_text()
    assert "ValueError: a &lt;bad&gt; sample" in failed


def _drawn(text: str) -> tuple[list[list[tuple[float, float]]], list[tuple[float, float]], list[str]]:
    """Lines, dots and texts of the one drawing of a page."""
    (drawing,) = re.findall(r"<svg.*?</svg>", text)
    tree = ElementTree.fromstring(drawing)
    lines = [line.get("points", "").split() for line in tree.iter("polyline")]
    pairs = [[(float(point.split(",")[0]), float(point.split(",")[1])) for point in line] for line in lines]
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in tree.iter("circle")]
    width, height = float(tree.get("width", "")), float(tree.get("height", ""))
    for x, y in [point for line in pairs for point in line] + dots:
        assert 0 < x < width
        assert 0 < y < height
    return pairs, dots, [str(each.text) for each in tree.iter("text")]


def test_curves_lie_in_their_panel_and_end_where_values_are_not_finite() -> None:
    points = [(step, float(value)) for step, value in enumerate([5, 3, 1, float("nan"), float("inf"), 2])]
    text = page("M", "facts", {"a_loss": points, "b_loss": [(2, 4.0)], "x": [(0, float("nan"))]}, [("saved", 3)], [])
    lines, dots, _ = _drawn(text)
    heights = [y for _, y in lines[0]]
    assert (len(lines), len(dots)) == (1, 5), "two that stand alone are dots"
    assert heights == sorted(heights), "a smaller value is lower on the page"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 4e-3], ["0", "0.001", "0.002", "0.003", "0.004"]),
        ([9800, 12100], ["10000", "10500", "11000", "11500", "12000"]),
        ([7, 7], ["7"]),
    ],
)
def test_ticks_are_round_numbers(values: list[float], expected: list[str]) -> None:
    _, _, texts = _drawn(page("M", "facts", {"x": [*zip((0, 55), values, strict=True)]}, [], []))
    steps = ["0", "10", "20", "30", "40", "50"]
    assert sorted(texts[1:]) == sorted([*expected, *steps])


def test_a_loss_that_falls_far_has_a_logarithmic_axis() -> None:
    lines, _, texts = _drawn(page("M", "facts", {"loss": [(step, 10.0**-step) for step in range(4)]}, [], []))
    assert texts[0] == "loss, logarithmic"
    assert {"1", "0.1", "0.01", "0.001"} <= {*texts}
    heights = [y for _, y in lines[0]]
    falls = [after - before for before, after in itertools.pairwise(heights)]
    assert falls == pytest.approx(falls[:1] * 3, abs=0.2)  # a tenth of a pixel is the rounding
    assert _drawn(page("M", "facts", {"x": [(0, 1.0), (1, 1e-3)]}, [], []))[2][0] == "x"


class _Trainer:
    is_global_zero, sanity_checking = True, False
    global_step = 0
    callback_metrics: dict[str, float] = {}  # noqa: RUF012


def test_a_plateau_is_flat_and_validations_are_points() -> None:
    seen, trainer = RunPageCallback(), _Trainer()
    seen._file = Path("run.html")
    for step in range(1, 13):
        trainer.global_step = step
        trainer.callback_metrics |= {"lr": 0.5, "x": 1.0 if step < 9 else 3.0}
        seen._read(trainer)
        if step % 4 == 0:
            seen.on_validation_start(trainer, None)
            trainer.callback_metrics |= {"val_loss": 4.0 / step}
            seen.on_validation_end(trainer, None)
    assert seen.metrics["val_loss"] == [(4, 1.0), (8, 0.5), (12, 4 / 12)]
    assert seen.metrics["lr"] == [(step, 0.5) for step in range(1, 13)]
    assert seen.metrics["x"] == [(step, 1.0 if step < 9 else 3.0) for step in range(1, 13)]


def test_long_runs_keep_fewer_points() -> None:
    seen, trainer = RunPageCallback(), _Trainer()
    for step in range(3 * MOST_POINTS):
        trainer.global_step, trainer.callback_metrics = step, {"loss": float(step)}
        seen._read(trainer)
    points = seen.metrics["loss"]
    assert MOST_POINTS / 2 < len(points) <= MOST_POINTS
    assert (points[0], points[-1]) == ((0, 0.0), (3 * MOST_POINTS - 1, 3.0 * MOST_POINTS - 1))


def test_no_interval_of_nothing() -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps is 0, but must be 1 or more"):
        RunPageCallback(every_n_steps=0)
