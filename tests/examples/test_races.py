"""Races of the benchmarks: contestants in processes of their own, that take turns; no time is looked at."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from examples.benchmarks import engines, overheads, turns
from examples.benchmarks.llama import SIZES
from examples.benchmarks.processes import Place
from examples.benchmarks.races import time_together
from examples.benchmarks.turns import Plan, Result, build, difference
from examples.benchmarks.variants import build_variant
from examples.benchmarks.workload import Workload

TINY = Workload(size=SIZES["tiny"], seq_len=16, batch_size=2)
PLAN = Plan(rounds=2, steps=1, warmup=1)


def _race(names: list[str], variants: bool = False, **changes: Any) -> Result:
    plan = Plan(rounds=2, steps=4, warmup=0) if variants else PLAN
    return time_together(names, replace(TINY, **changes), plan, build_variant if variants else build)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (["hand_fsdp", "lightning_fsdp", "shard_fsdp_aligned"], ["lightning_fsdp"]),
        (["hand_ddp", "lightning_ddp", "shard_ddp"], []),
        *(([f"deepspeed_{stage}", f"shard_deepspeed_{stage}"], []) for stage in ("stage_1", "stage_2", "stage_3")),
    ],
)
def test_contestants_take_turns_and_learn_the_same(names: list[str], left_out: list[str]) -> None:
    pytest.importorskip("greenlet")
    found = _race(names)
    assert list(found.left_out) == left_out
    assert all("requires a GPU" in why for why in found.left_out.values())
    assert list(found.seconds) == [name for name in names if name not in left_out]
    reference = found.losses[names[0]]
    assert len(reference) == 2 * PLAN.total
    assert reference[: PLAN.total] != reference[PLAN.total :], "the ranks saw the same batches"
    assert len(set(reference)) == 2 * PLAN.total
    for name, blocks in found.seconds.items():
        assert len(blocks) == PLAN.rounds
        # fp32 sums in another order, in three steps.
        assert difference(found.losses[name], reference) < 1e-5


@pytest.mark.matrix
def test_variants_do_what_they_are_called_and_learn_the_same() -> None:
    pytest.importorskip("greenlet")
    names = ["hand_fsdp", "hand_fsdp+clip", "shard_fsdp+clip", "hand_fsdp+validate", "shard_fsdp+validate"]
    names += ["shard_fsdp+log", "hand_fsdp+boundary", "shard_fsdp+boundary", "shard_fsdp+micro_batch"]
    losses = _race(names, variants=True).losses
    assert list(losses) == names
    losses = {name: found[: len(found) // 2] for name, found in losses.items()}  # rank 0's
    for name in names:
        reference = losses[overheads.reference_of(name).replace("micro_batch", "boundary")]
        # fp32 sums in another order, in eight steps.
        assert difference(losses[name], reference) < 1e-5
    # The norm is above 1 at first, and accumulation learns nothing before its fourth batch.
    assert losses["hand_fsdp+clip"][2] != losses["hand_fsdp"][2]
    assert losses["hand_fsdp+boundary"][2] != losses["hand_fsdp"][2]


def _fails_later(name: str, work: Workload, place: Place, plan: Plan) -> Any:
    contestant: Any = build("hand_ddp", work, place, plan)
    if name == "ends":
        steps, run = [0], contestant.run

        def ends(count: int) -> None:
            steps[0] += count
            assert steps[0] < 3 or place.rank, "rank 0 takes two steps"
            run(count)

        contestant.run = ends
    return contestant


@pytest.mark.matrix
def test_one_that_ends_in_the_middle_leaves_the_others() -> None:
    result = time_together(["ends", "hand_ddp"], TINY, PLAN, _fails_later)
    assert result.left_out == {"ends": "AssertionError: rank 0 takes two steps"}
    assert {name: len(blocks) for name, blocks in result.seconds.items()} == {"hand_ddp": PLAN.rounds}


def test_the_control_sleeps_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 2.0, 6.0])
    slept: list[float] = []
    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=slept.append))
    ran: list[int] = []
    inside: Any = SimpleNamespace(run=ran.append, end=None, losses=[])
    slowed = turns.Slowed(inside, cast("Place", SimpleNamespace(now=lambda: next(clock))))
    slowed.run(2)
    assert (ran, slept) == ([1, 1], [0.05 * 2.0, 0.05 * 4.0])
    rows = [{"race": "one", "contestant": "a+sleep", "ratio_low": 1.03}, {"race": "one", "contestant": "a"}]
    assert engines._control(rows) == 0
    assert engines._control([{**rows[0], "ratio_low": 0.99}]) == engines._control(rows[1:]) == 1
