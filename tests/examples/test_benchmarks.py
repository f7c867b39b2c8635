"""The benchmarks: what they find, compare and refuse, at the tiniest sizes; no time is looked at."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from examples.benchmarks import engines, overheads, report
from examples.benchmarks.limits import Trial, largest
from examples.benchmarks.llama import SIZES
from examples.benchmarks.processes import Failed
from examples.benchmarks.python_loops import LOOPS
from examples.benchmarks.races import compare_with_others, rows_of
from examples.benchmarks.trainers import STOCK
from examples.benchmarks.turns import Result, paired, spread
from examples.benchmarks.variants import FEATURES
from examples.benchmarks.workload import Workload
from lightning_shard.registry import PRESETS

TINY = Workload(size=SIZES["tiny"], seq_len=16, batch_size=2)


def test_every_name_of_this_package_races_against_something() -> None:
    names = [name for contestants in engines.RACES.values() for name in contestants]
    assert sorted(name for name in names if name in PRESETS) == sorted(PRESETS)
    assert len(names) == len(set(names))
    known = {*LOOPS, *STOCK, *PRESETS}
    assert set(names) <= known
    for contestants in overheads.RACES.values():
        assert {name.partition("+")[0] for name in contestants} <= known
        assert {name.partition("+")[2] for name in contestants} <= set(FEATURES)
        assert {overheads.reference_of(name) for name in contestants} <= set(contestants)


def _result(**losses: list[float]) -> Result:
    seconds = {name: [1.0 + 0.1 * index, 2.0, 3.0] for index, name in enumerate(losses)}
    return Result(seconds=seconds, losses=losses)


def test_blocks_of_one_round_are_compared() -> None:
    assert paired([2.0, 30.0, 6.0], [1.0, 10.0, 2.0]).median == 3.0
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.smallest, found.low, found.median, found.high, found.largest) == (1.0, 2.0, 3.0, 4.0, 100.0)
    assert spread([5.0]).low == 5.0
    # With B of B(9, 1/2), 2 P(B <= 1) is 0.039 and 2 P(B <= 2) is 0.18: of 9 the second is the first in it.
    assert spread([float(value) for value in range(9, 0, -1)]).interval == (2, 8)


def test_the_fastest_other_package_is_the_one_compared_with() -> None:
    names = ("hand", "lightning_ddp", "accelerate_ddp", "shard_ddp")
    result = _result(**{name: [5.0] for name in names})
    result.seconds = dict(zip(names, ([1.0, 2.0], [1.2, 2.2], [1.1, 2.2], [1.21, 2.2]), strict=True))
    rows = rows_of("race", result, TINY, lambda name: "hand")
    compare_with_others(rows, result)
    assert [row.get("other") for row in rows] == [None, None, None, "accelerate_ddp"]
    assert (rows[-1]["other_ratio"], rows[-1]["other_ratios"]) == (1.05, "1.000..1.100")


def test_a_contestant_with_other_losses_has_failed() -> None:
    result = _result(hand=[5.0, 4.0], same=[5.0, 4.0001], other=[5.0, 4.1], lost=[5.0, math.nan])
    rows = {row["contestant"]: row for row in rows_of("race", result, TINY, lambda name: "hand")}
    assert [name for name, row in rows.items() if row["failed"]] == ["other", "lost"]
    assert "ratio" not in rows["other"]
    assert rows["same"]["ratio"] == 1.0
    assert rows["hand"]["tokens"] == TINY.tokens / 2


@pytest.mark.parametrize("limit", [0, 1, 13, 64, 100])
def test_bisection_finds_the_largest(limit: int) -> None:
    tried: list[int] = []

    def attempt(size: int) -> Trial | None:
        tried.append(size)
        return Trial(size=size, peak=size, seconds=1.0) if size <= limit else None

    for start in (1, 5, 1000):
        tried.clear()
        best, count = largest(attempt, most=64, resolution=64, start=start)
        assert (0 if best is None else best.size) == min(limit, 64)
        assert count == len(tried) == len(set(tried))
        assert (tried[0], max(tried) <= 64) == (min(start, 64), True)


def test_what_fails_once_is_told_once_and_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([2.0, 3.0, 5.0, 3.0, 6.0, 4.0])

    def measure(name: str) -> float:
        if name == "deepspeed_stage_3":
            raise Failed("ModuleNotFoundError: No module named 'deepspeed'")
        return next(seconds)

    names = ["hand_ddp", "shard_ddp", "deepspeed_stage_3", "shard_deepspeed_stage_3"]
    result = overheads.time_in_turn("first_step", names, measure, 2)
    told = "first_step: deepspeed_stage_3 did not run: ModuleNotFoundError: No module named 'deepspeed'"
    assert capsys.readouterr().out.splitlines() == [told]
    rows = overheads.rows_of_seconds("first_step", names, result)
    assert [row["contestant"] for row in rows] == ["hand_ddp", "shard_ddp", "shard_deepspeed_stage_3"]
    # Backwards the second time.
    assert [row["seconds"] for row in rows] == [3.0, 4.5, 4.0]
    assert [row.get("ratio") for row in rows] == [1.0, 1.5, None]


def test_tables_files_and_pictures(tmp_path: Path) -> None:
    rows = [{"name": "a", "value": 1.23456}, {"name": "b", "other": 2}]
    assert report.table(rows, {"name": "", "value": "v"}).splitlines() == ["       v", "a  1.235", "b      -"]
    report.write_csv(rows, tmp_path / "new" / "rows.csv")
    assert list(csv.DictReader((tmp_path / "new" / "rows.csv").open()))[1] == {"name": "b", "value": "", "other": "2"}
    assert "torch" in report.environment("cpu")
    pytest.importorskip("matplotlib")
    result = _result(hand=[5.0], other=[5.0], failed=[6.0])
    engines.draw(rows_of("race", result, TINY, lambda name: "hand"), tmp_path, "title")
    assert (tmp_path / "engines.png").read_bytes().startswith(b"\x89PNG")
