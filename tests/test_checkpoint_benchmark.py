"""The benchmark of saving and loading, at a tiny size."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import checkpoint_io, planning
from tests.harness import run_distributed

TINY = "--layers 1 --width 16 --heads 2 --seq-len 8 --batch-size 1 --repetitions 2 --rounds 1 --steps 2"


def measure(folder: str) -> dict[str, Any]:
    return checkpoint_io.train(checkpoint_io.parse_arguments(TINY.split()), Path(folder))


@pytest.mark.filterwarnings("ignore")
def test_every_way_is_timed_and_shown(tmp_path: Path) -> None:
    first, _ = run_distributed(measure, 2, str(tmp_path))
    seconds = first["seconds"]
    ways = ("plain files", "DCP alone", "stock Lightning, full", "lightning_shard")
    assert {what: len(values) for what, values in seconds.items()} == {
        **{f"{kind}, {way}": 2 for kind in ("save", "load") for way in ways},
        **{f"step, {kind}": 2 for kind in checkpoint_io.ROUNDS},
        **{f"blocked, {kind}": 1 for kind in checkpoint_io.ROUNDS[1:]},
        "rest of a save in the background, after its round": 1,
    }
    text = checkpoint_io.table(seconds, first["bytes"])
    assert all(what in text for what in seconds)
    checkpoint_io.write(seconds, tmp_path / "io.csv")
    rows = list(csv.DictReader((tmp_path / "io.csv").open()))
    assert len(rows) == sum(map(len, seconds.values()))


def test_plans_for_made_up_ranks(tmp_path: Path) -> None:
    points = planning.measure([2, 4], layers=1, width=16)
    assert [(p.layout, p.ranks) for p in points] == [(layout, ranks) for layout in planning.LAYOUTS for ranks in (2, 4)]
    assert all(p.torch_seconds is not None for p in points)
    planning.write(points, tmp_path / "plan.csv")
    planning.draw(points, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert len((tmp_path / "plan.csv").read_text().splitlines()) == 7
    assert "rows" in planning.table(points)
