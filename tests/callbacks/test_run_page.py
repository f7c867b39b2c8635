"""The page of a run: all that was logged, over restarts, and also of a fit that fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_shard.callbacks import MemoryCallback, RunPageCallback, ThroughputCallback
from lightning_shard.callbacks.run_page import MOST_POINTS
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


class _Trainer:
    is_global_zero, sanity_checking = True, False
    global_step = 0
    callback_metrics: dict[str, float] = {}  # noqa: RUF012


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
