"""The plan against published runs: the tables' rows, and runs whose memory or step has to be within its bar."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.benchmarks import published, published_report
from examples.benchmarks.published_runs import RUNS, Published
from examples.benchmarks.published_tables import FMS_FSDP, LLM_FOUNDRY, TORCHTITAN_A100


def named(start: str) -> Published:
    (run,) = [run for run in (*RUNS, *FMS_FSDP, *LLM_FOUNDRY) if run.name.startswith(start)]
    return run


def test_runs_are_published_and_in_halves() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert all(run.source and run.half in ("fitted", "judged") for run in RUNS)
    halves = [sum(run.half == half for run in RUNS) for half in ("fitted", "judged")]
    assert abs(halves[0] - halves[1]) <= len(RUNS) // 8
    assert all((run.reserved is None) != (run.largest is None) for run in RUNS)


@pytest.mark.matrix
def test_a_run_within_its_bar(tmp_path: Path) -> None:
    """FSDP2 with 1.5 billion parameters on 8 H100: what the allocator reserved, within 10 %."""
    row = published.row_of(named("Qwen"))
    assert row["ratio"] == pytest.approx(1, abs=0.1)
    assert row["low"] <= row["predicted"] <= row["high"]
    assert row["why"] == ""
    batches = {"unit": "samples", "half": "fitted", "published": 8, "predicted": 6, "low": 6, "high": 9}
    step = {"half": "judged", "tokens": 4000, "step_ratio": 0.9}
    published_report.draw([row, batches, step], tmp_path / "published.png")
    assert (tmp_path / "published.png").read_bytes().startswith(b"\x89PNG")


def test_tables_of_throughput() -> None:
    """Every row of the tables: 8, 18 + 52 + 7 + 61 + 78 and 3, in halves, with the models' published sizes."""
    assert (len(FMS_FSDP), len(LLM_FOUNDRY), len(TORCHTITAN_A100)) == (8, 216, 3)
    assert len({run.name for run in LLM_FOUNDRY}) == 216
    assert sum(run.half == "fitted" for run in LLM_FOUNDRY) == 109
    sizes = {"MPT 7b, 2048 tokens, 512 H100": 6_658_859_008, "MPT 30b, 8192 tokens, 8 H100": 30_019_254_272}
    with torch.device("meta"):
        for start, size in sizes.items():
            assert sum(p.numel() for p in named(start).model().parameters()) == size
    run = named("MPT 13b, 16384 tokens, 8 A100, 3 x 3, r")
    assert (run.tokens, run.batch, run.micro_batches, run.nodes.ranks) == (1431, 3, 3, 8)
    assert run.half == "fitted"


def test_a_step_within_its_bar() -> None:
    row = published.row_of(named("MPT 125m, 4096 tokens, 8 A100, 2 x 16"))
    assert row["step_ratio"] == pytest.approx(1, abs=0.2)
    assert row["fits"] == "fits"
