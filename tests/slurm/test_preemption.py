"""Jobs that SLURM stops: each ends in a whole checkpoint, goes back into the queue and ends as if nothing had been."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.checkpoint.load import find_checkpoints
from tests.harness import run_distributed, until
from tests.slurm.conftest import Jobs
from tests.slurm.programs import slow

pytestmark = pytest.mark.slurm

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")


def _here(root: str, devices: int, steps: int, engine: str = "ddp", seed: int = 0) -> dict[str, Any]:
    return slow(root, devices, 1, steps, 0.0, engine=engine, seed=seed)


class Stopping:
    """One job that is stopped again and again."""

    def __init__(self, jobs: Jobs, folder: Path, steps: int) -> None:
        self.jobs, self.root, self.said = jobs, folder / "runs", folder / "said"
        self.steps = steps
        self.restarts = 0
        program = jobs.program(
            "slow",
            "result",
            root=str(self.root),
            devices=1,
            nodes=2,
            steps=steps,
            seconds=0.1,
            log=str(self.said),
            preemption={"seconds_before_limit": 38.0},
        )
        # A minute is the shortest limit that SLURM has.
        self.job = jobs.submit(jobs.script(f"srun {program}"), *TWO_NODES, "--time=1")

    def happened(self, what: str) -> int:
        return len(re.findall(what, self.said.read_text())) if self.said.exists() else 0

    def wait_for(self, what: str) -> None:
        """Until the run does it the next time."""
        before = self.happened(what)
        until(lambda: self.happened(what) > before)

    def extend(self) -> None:
        self.jobs.cluster.command("scontrol", "update", f"JobId={self.job}", "TimeLimit=30")

    def signal(self, name: str) -> None:
        self.jobs.cluster.command("scancel", f"--signal={name}", self.job)

    def requeued(self, reason: str) -> None:
        """Wait until it is, and look at what it left."""
        self.restarts += 1
        until(lambda: self.jobs.cluster.field(self.job, "Restarts") == str(self.restarts))
        # What the tasks print comes by way of srun, a moment later.
        said = f"SLURM job {self.job} goes back into the queue"
        until(lambda: self.jobs.log(self.job).count(said) == self.restarts, 20)
        until(lambda: f"stopped by {reason} after step" in self.jobs.log(self.job), 20)
        found = find_checkpoints([self.root / "preempted"], f"slurm-{self.job}-0")
        assert len(found.own) == 1
        assert not found.broken

    def finish(self) -> None:
        assert self.jobs.cluster.wait(self.job, seconds=200) == "COMPLETED"
        result = self.jobs.result("result")
        here = str(self.root.parent / "here")
        expected = run_distributed(_here, 2, here, 2, self.steps)[0]
        assert (result["steps"], result["parameters"]) == (self.steps, expected["parameters"])
        # The last part began where the one before had stopped.
        assert 0 < result["own_steps"] < self.steps
        assert not list((self.root / "preempted").glob("*.ckpt"))


def test_by_the_time_limit_and_by_signals(jobs: Jobs, tmp_path: Path) -> None:
    run = Stopping(jobs, tmp_path, steps=150)
    run.wait_for("start")
    run.requeued("the time limit")
    run.wait_for("start")
    run.extend()
    time.sleep(random.uniform(0, 2))
    run.signal("USR1")
    run.requeued("SIGUSR1")
    run.wait_for("start")
    run.extend()
    run.wait_for("validation")
    run.signal("TERM")
    run.requeued("SIGTERM")
    run.wait_for("start")
    run.extend()
    run.finish()


def test_cancelled_it_is_saved_and_stays_cancelled(jobs: Jobs, tmp_path: Path) -> None:
    run = Stopping(jobs, tmp_path, steps=300)
    run.wait_for("start")
    jobs.cluster.command("scancel", run.job)
    assert jobs.cluster.wait(run.job) == "CANCELLED"
    until(lambda: "is being ended by SLURM, and is not put back" in jobs.log(run.job), 20)
    assert len(find_checkpoints([run.root / "preempted"], f"slurm-{run.job}-0").own) == 1
