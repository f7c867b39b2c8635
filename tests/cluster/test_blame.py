"""Which rank the others wait for, in hangs whose cause is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_shard.cluster.traces import Report, blame

RECORDED = json.loads((Path(__file__).parent / "recorded_hangs.json").read_text())
"""By failure, for each of 16 ranks: the collective that it waits in, and its last number by group.

Read with `traces.position` from the Flight Recorder dumps of NVIDIA/nvidia-resiliency-ext (Apache 2.0), commit d8686d9,
tests/attribution/unit/fr_traces: tensor, pipeline and expert parallelism, where faults were injected into two ranks.
"""

# As its reference_outputs have them. In the first, rank 14 (a fault too) waits for rank 12, in which the other was.
CULPRITS = {"gpu_error_1st": [12], "gpu_error_2nd": [9, 14], "lock_gil_1st": [9, 14], "lock_gil_2nd": [10, 15]}


@pytest.mark.parametrize("failure", CULPRITS)
def test_the_ranks_that_were_made_to_fail_are_named(failure: str) -> None:
    reports = {
        rank: Report(
            name=f"rank {rank}", seconds=600.0, phase="forward", step=1, line="", waits=waits, recent=[], last=last
        )
        for rank, (waits, last) in enumerate(
            ([*waits, ""] if waits else None, last) for waits, last in RECORDED[failure]
        )
    }
    assert blame(reports) == CULPRITS[failure]
