"""Jobs that are wrong in some way are told so on every rank, in seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.conftest import Jobs

pytestmark = pytest.mark.slurm

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")

# What the ranks are told; a second entry where rank 1 sees another side of it.
TOLD = {
    "nodes": [r"on 2 nodes \(lsh\[1-2\]\), but num_nodes is 3 .* Set #SBATCH --nodes=3"],
    "devices": [r"devices is 2, of which slurm needs 2 tasks on each node. Set #SBATCH --nodes=2 --ntasks-per-node=2"],
    "settings": [r"trainer.max_steps differs between ranks: 3 on rank 0 \(lsh1\), 4 on rank 1 \(lsh2\)"],
    "folder": [r"is not one folder for all nodes: a file of rank 0 on lsh1 is not seen by rank 1 \(lsh2\)"],
    "address": [
        r"\[rank 0 on lsh1\] the main address 'nowhere.invalid' can't be resolved",
        r"\[rank 1 on lsh2\] the main address 'nowhere.invalid' can't be resolved",
    ],
    "port": [
        r"\[rank 0 on lsh1\] port \d+ can't be listened on.*Set MASTER_PORT",
        r"\[rank 1 on lsh2\] rank 0 did not answer at lsh1:\d+ in 6 s",
    ],
    "versions": [r"deepspeed differs between ranks: 0\..* on rank 0 \(lsh1\), 0.1 on rank 1 \(lsh2\)"],
    "nothing": ["ran"],
}


def test_what_the_ranks_are_told(jobs: Jobs, tmp_path: Path) -> None:
    program = jobs.program("wrong", "result", root=str(tmp_path / "runs"), private=str(jobs.cluster.private))
    job = jobs.submit(jobs.script(f"srun {program}"), *TWO_NODES)
    assert jobs.cluster.wait(job) == "COMPLETED"
    for rank, told in enumerate(jobs.result("result")):
        assert set(told) == set(TOLD)
        for case, says in TOLD.items():
            assert re.search(says[min(rank, len(says) - 1)], told[case], re.DOTALL), (case, rank, told[case])
