"""The plan against published runs: the table's rows, and one run whose memory has to be within its bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.benchmarks import published
from examples.benchmarks.published_runs import RUNS


def test_runs_are_published_and_in_halves() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert all(run.source and run.half in ("fitted", "judged") for run in RUNS)
    halves = [sum(run.half == half for run in RUNS) for half in ("fitted", "judged")]
    assert abs(halves[0] - halves[1]) <= len(RUNS) // 8
    assert all((run.reserved is None) != (run.largest is None) for run in RUNS)


def test_a_run_within_its_bar(tmp_path: Path) -> None:
    """FSDP2 with 1.5 billion parameters on 8 H100: what the allocator reserved, within 10 %."""
    (run,) = [run for run in RUNS if run.name.startswith("Qwen")]
    row = published.row_of(run)
    assert row["ratio"] == pytest.approx(1, abs=0.1)
    assert row["low"] <= row["predicted"] <= row["high"]
    assert row["why"] == ""
    batches = {"unit": "samples", "half": "fitted", "published": 8, "predicted": 6, "low": 6, "high": 9}
    published.draw([row, batches], tmp_path / "published.png")
    assert (tmp_path / "published.png").read_bytes().startswith(b"\x89PNG")
