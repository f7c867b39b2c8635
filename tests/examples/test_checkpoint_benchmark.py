"""The benchmark of saving and loading, at a tiny size; no time is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.benchmarks import checkpoint_io, planning, report
from examples.benchmarks.processes import Place
from tests.examples.test_benchmarks import TINY
from tests.harness import run_distributed

OPTIONS = ["--repetitions", "2", "--rounds", "1", "--steps", "2"]


def measure(folder: str) -> Any:
    place = Place(rank=dist.get_rank(), device=torch.device("cpu"))
    return checkpoint_io.measure(place, TINY, checkpoint_io.parse_arguments(OPTIONS), Path(folder))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_every_way_is_timed_and_shown(tmp_path: Path) -> None:
    seconds, total = run_distributed(measure, 2, str(tmp_path))[0]
    ways = ("plain files", "DCP alone", "stock Lightning, one file", "lightning_shard")
    assert {what: len(values) for what, values in seconds.items()} == {
        **{f"{kind}, {way}": 2 for kind in ("save", "load") for way in ways},
        **{f"a step after {kind}": 1 for kind in checkpoint_io.ROUNDS},
        **{f"training waits, {kind}": 1 for kind in checkpoint_io.ROUNDS[1:]},
        **{f"left to write after these steps, {kind}": 1 for kind in checkpoint_io.ROUNDS[2:]},
    }
    rows = checkpoint_io.rows_of(seconds, total)
    text = report.table(rows, checkpoint_io.COLUMNS)
    assert all(what in text for what in seconds)
    report.write_csv(rows, tmp_path / "io.csv")
    assert len((tmp_path / "io.csv").read_text().splitlines()) == 1 + len(seconds)


def test_plans_for_made_up_ranks(tmp_path: Path) -> None:
    points = planning.measure([2, 4], layers=1, width=16)
    assert [(p.layout, p.ranks) for p in points] == [(layout, ranks) for layout in planning.LAYOUTS for ranks in (2, 4)]
    assert all(p.torch_seconds is not None for p in points)
    planning.draw(points, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert "sharded by rows (FSDP2)" in report.table(planning.rows_of(points), planning.COLUMNS)
