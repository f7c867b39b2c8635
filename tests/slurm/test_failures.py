"""Tasks that fail: the others end in time, and say which rank it was and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.conftest import Jobs

pytestmark = pytest.mark.slurm

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--no-requeue")


def _run(jobs: Jobs, folder: Path, *cases: tuple[str, bool]) -> list[str]:
    """What each of the steps printed; all in one job, one after the other."""
    lines = []
    for number, (how, stuck) in enumerate(cases):
        program = jobs.program("failing", "unused", root=str(folder / "runs"), how=how, stuck=stuck)
        # Without --kill-on-bad-exit SLURM leaves the other tasks alone.
        lines.append(f"srun --kill-on-bad-exit=0 --output={folder}/step-{number}.log {program}; echo ended: $?")
    job = jobs.submit(jobs.script("\\n".join(lines).replace("\\n", "\n")), *TWO_NODES)
    assert jobs.cluster.wait(job, seconds=200) == "COMPLETED"
    ended = re.findall(r"ended: (\d+)", jobs.log(job))
    assert len(ended) == len(cases)
    assert "0" not in ended
    return [(folder / f"step-{number}.log").read_text(errors="replace") for number in range(len(cases))]


def test_the_others_end_and_name_the_rank(jobs: Jobs, tmp_path: Path) -> None:
    raised, killed = _run(jobs, tmp_path, ("raise", False), ("kill", True))
    # Said by the watching thread, or with the collective's own error, whichever comes first.
    assert re.search(r"\[rank 0.*rank 1 on lsh2 failed: ValueError: token 50257 is not in the vocabulary", raised)
    assert re.search(r"\[rank 0 on lsh1\] ends.*rank 1 on lsh2 gave no sign of life: killed", killed, re.DOTALL), killed
    # Of the second step.
    (traces,) = (tmp_path / "runs/failures").glob("slurm-*-1/rank_0.txt")
    assert str(traces) in killed, killed
    assert "gloo:" in traces.read_text()
    assert "in training_step" in traces.read_text()
