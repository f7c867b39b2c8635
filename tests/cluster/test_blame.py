"""Which rank the others wait for, in hangs whose cause is known, and who is counted as silent."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shard.cluster import watch
from lightning_shard.cluster.traces import Report, describe_hang, ranks_to_blame

RECORDED = json.loads((Path(__file__).parent / "recorded_hangs.json").read_text())
"""By failure, for each of 16 ranks: the collective that it waits in, and its last number by group.

Read with `traces.collective_position` from the Flight Recorder dumps of NVIDIA/nvidia-resiliency-ext (Apache 2.0),
commit d8686d9, tests/attribution/unit/fr_traces: tensor, pipeline and expert parallelism, where faults were injected
into two ranks.
"""

# As its reference_outputs have them. In the first, rank 14 (a fault too) waits for rank 12, in which the other was.
CULPRITS = {"gpu_error_1st": [12], "gpu_error_2nd": [9, 14], "lock_gil_1st": [9, 14], "lock_gil_2nd": [10, 15]}


@pytest.mark.parametrize("failure", CULPRITS)
def test_the_ranks_that_were_made_to_fail_are_named(failure: str) -> None:
    reports = {
        rank: Report(name=f"rank {rank}", seconds=600.0, phase="forward", step=1, line="", waits=waits, last=last)
        for rank, (waits, last) in enumerate(
            ([*waits, ""] if waits else None, last) for waits, last in RECORDED[failure]
        )
    }
    assert ranks_to_blame(reports) == CULPRITS[failure]


def _reports(*waits: Any, last: int = 5) -> dict[int, Report]:
    same: dict[str, Any] = {"seconds": 60.0, "phase": "forward", "step": 1, "line": ", from f at a.py:1"}
    return {rank: Report(name=f"rank {rank}", waits=each, last={"0": last}, **same) for rank, each in enumerate(waits)}


SUM, GATHER = ("0", 5, "sum [[2]]", ", from f at a.py:2"), ("0", 5, "gather [[2]]", ", from f at a.py:3")


@pytest.mark.parametrize(
    ("reports", "culprits"),
    [
        (_reports(None, None), []),  # nobody waits for anybody
        (_reports(SUM, SUM, SUM), []),  # all in the same one, which the network does not end
        (_reports(SUM, None, SUM), [1]),
        (_reports(SUM, GATHER, SUM), [1]),
        (_reports(SUM, GATHER), [0]),  # as many in either: the last rank's is as good as the first's
    ],
)
def test_who_is_to_blame(reports: dict[int, Report], culprits: list[int]) -> None:
    assert ranks_to_blame(reports) == culprits


def test_a_hang_is_described() -> None:
    assert describe_hang(_reports(SUM, GATHER), [0]) == (
        "rank 0 has not moved for 60 s: it is in forward after step 1, where it waits in sum [[2]], number 5 of group "
        "0, from f at a.py:2. rank 1 is in forward after step 1, where it waits in gather [[2]], number 5 of group 0, "
        "from f at a.py:3"
    )


def test_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = [0.0], dist.HashStore()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    counter = watch.SilenceCounter(store, 0, 3, 1.0, 20.0)

    def looks(seconds: int, *alive: int, every: float = 1.0) -> list[int]:
        found = []
        for _ in range(seconds):
            clock[0] += every
            for rank in alive:
                store.set(f"beat/{rank}", f"{clock[0]} 0")
            found = counter.silent_ranks()
        return found

    assert looks(30, 1, 2) == []
    assert looks(17, 1) == []
    assert looks(2, 1) == [2]
    assert looks(30, 1, 2) == []
    # Whoever looks late was stopped itself, or has no time.
    assert looks(5, 1, every=10.0) == []
    assert looks(3, 1, 2) == []
    store.set("suspicion", "")
    assert looks(8, 1, 2) == []
    assert store.check(["nobody is silent"])
    assert looks(5, 1) == [2], "at once, where a connection was lost"
