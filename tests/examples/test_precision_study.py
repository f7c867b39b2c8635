"""The study of precisions: what it measures, on a small model, and what it makes of it."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.precision_study import Settings, Study, draw, run, table, write
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


def _measure(strategy: str) -> dict[str, Any]:
    study = Study()
    trainer = quiet_trainer(strategy=strategy, precision="bf16-true", max_steps=6, callbacks=[study])
    model = TinyLM(dtype=torch.bfloat16, tie=True, lr=1e-5)
    torch.manual_seed(1)
    trainer.fit(model, loader())
    return {**study.results(), "seen": model.seen}


@pytest.mark.matrix
def test_the_study_sees_equal_engines_as_equal_and_lost_updates_as_lost() -> None:
    fsdp, zero, plain = (
        run_distributed(_measure, 2, name)
        for name in ("shard_fsdp_aligned", "shard_deepspeed_stage_3_aligned", "shard_fsdp")
    )
    assert fsdp[0]["seen"] != fsdp[1]["seen"]
    assert fsdp[0]["losses"] == fsdp[1]["losses"] == zero[0]["losses"]
    assert fsdp[0]["digest"] == fsdp[1]["digest"] == zero[0]["digest"]
    assert len(fsdp[0]["losses"]) == len(fsdp[0]["seconds"]) == 6
    # The same weights see the same first batch; what differs is what the steps do to them.
    assert plain[0]["losses"][0] == fsdp[0]["losses"][0]
    assert plain[0]["digest"] != fsdp[0]["digest"]
    # Six steps of 1e-5 are below half of bf16's spacing for weights above 0.016; most are, being drawn from 0.3.
    assert 0 < plain[0]["moved"] < 0.5 < fsdp[0]["moved"] < 1


def _settings(strategy: str, rate: float = 1e-5) -> Settings:
    return Settings(
        strategy=strategy,
        learning_rate=rate,
        precision="bf16-true",
        steps=12,
        processes=2,
        device="cpu",
        seq_len=8,
        batch_size=1,
        limit_bytes=100,
        model="nowhere.gguf",
    )


def _result(strategy: str, rate: float = 1e-5, *, digest: str = "one", slope: float = -0.5) -> dict[str, Any]:
    losses = [10 + slope * step for step in range(12)]
    settings = asdict(_settings(strategy, rate))
    return {"settings": settings, "losses": losses, "seconds": [1.0] * 12, "moved": 0.25, "digest": digest}


def test_a_run_that_is_there_is_not_repeated(tmp_path: Path) -> None:
    result = _result("shard_fsdp")
    (tmp_path / "shard_fsdp-1e-05.json").write_text(json.dumps(result))
    # There is no model to train.
    assert run(_settings("shard_fsdp"), tmp_path) == result


def test_losses_are_written_with_all_digits(tmp_path: Path) -> None:
    result = _result("shard_fsdp", slope=-1 / 3)
    write([result, _result("shard_ddp")], tmp_path / "losses.csv")
    rows = list(csv.DictReader((tmp_path / "losses.csv").open()))
    assert len(rows) == 24
    assert [float(row["loss"]) for row in rows[:12]] == result["losses"]
    assert [row["step"] for row in rows[12:]] == [str(step) for step in range(1, 13)]
    assert {row["strategy"] for row in rows[12:]} == {"shard_ddp"}


def test_the_table_says_what_was_learned_and_which_runs_are_the_same_to_the_last_bit() -> None:
    untrained = _result("shard_fsdp", 0.0, digest="two", slope=0.0)
    other = _result("shard_fsdp", digest="three", slope=-0.25)
    runs = [_result("shard_fsdp_aligned"), _result("shard_ddp_aligned"), other]
    rows = [line.split() for line in table(runs, untrained).splitlines()[1:]]
    assert [row[-1] for row in rows] == ["A", "A", "B"]
    # Of 10, 9.5 ... 4.5 the last ten, and of 10 ... 7.25.
    assert [row[3] for row in rows] == ["6.7500", "6.7500", "8.3750"]
    assert [row[4] for row in rows] == ["3.2500", "3.2500", "1.6250"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    untrained = _result("shard_fsdp", 0.0, slope=0.0)
    draw([_result("shard_fsdp"), _result("shard_fsdp", 2e-5)], untrained, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
