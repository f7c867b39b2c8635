"""Strategies over the nodes of a SLURM give what they give on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed
from tests.slurm.conftest import Jobs
from tests.slurm.programs import strategies

pytestmark = pytest.mark.slurm


def _here(root: str, devices: int, shapes: dict[str, dict[str, int]]) -> dict[str, Any]:
    return strategies(root, devices, 1, shapes)


def test_train_validate_save_and_resume(jobs: Jobs, tmp_path: Path) -> None:
    nodes, tasks = 2, 1
    program = jobs.program("strategies", "result", root=str(tmp_path / "runs"), devices=tasks, nodes=nodes, shapes={})
    job = jobs.submit(jobs.script(f"srun {program}"), f"--nodes={nodes}", f"--ntasks-per-node={tasks}")
    # As many processes on one machine; the mesh that "auto" makes of nodes, given by hand.
    shapes = {"hybrid": {"replicate": nodes, "shard": tasks}}
    expected = run_distributed(_here, nodes * tasks, str(tmp_path / "here"), nodes * tasks, shapes)[0]
    assert jobs.cluster.wait(job, seconds=240) == "COMPLETED", jobs.log(job)
    result = jobs.result("result")
    assert result["hybrid"]["mesh"] == {"replicate": nodes, "shard": tasks}
    assert result["fsdp"]["mesh"] == {"replicate": 1, "shard": nodes * tasks}
    assert result == expected
