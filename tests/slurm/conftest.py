"""The cluster that the tests of the group share, and jobs on it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Generator[Cluster, None, None]:
    """Three nodes."""
    with Cluster(3) as running:
        yield running


@dataclass
class Jobs:
    """Batch jobs that run programs of ``tests.slurm.programs`` with ``srun``, in a folder of one test."""

    cluster: Cluster
    folder: Path

    def script(self, line: str, name: str = "job.sh", **environ: str) -> Path:
        """A batch script of one line."""
        path = self.folder / name
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ}
        exports = "\n".join(f"export {key}={shlex.quote(value)}" for key, value in settings.items())
        path.write_text(f"#!/bin/bash\n{exports}\n{line}\n")
        return path

    def program(self, name: str, output: str, **arguments: Any) -> str:
        """The command of a program; its result is written to ``output`` in the folder."""
        words = (sys.executable, "-m", "tests.slurm.programs", name, json.dumps(arguments))
        return f"{shlex.join(words)} {self.folder}/{output}"

    def submit(self, script: Path, *options: str) -> str:
        """Submit it; the log is ``JOB.log`` (``ARRAY_TASK.log``) in the folder."""
        log = "%A_%a.log" if any(o.startswith("--array") for o in options) else "%j.log"
        return self.cluster.submit(
            script, f"--output={self.folder}/{log}", "--open-mode=append", "--requeue", *options, cwd=self.folder
        )

    def log(self, job: str) -> str:
        """What the job has printed so far."""
        path = self.folder / f"{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def result(self, output: str) -> Any:
        """What rank 0 of a program returned."""
        return json.loads((self.folder / output).read_text())


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Generator[Jobs, None, None]:
    yield Jobs(cluster, tmp_path)
    cluster.cancel_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the jobs' logs, and what SLURM says of them, with a failure."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and folder is not None:
        for log in sorted(folder.glob("*.log")):
            report.sections.append((log.name, log.read_text(errors="replace")[-6000:]))
    running = getattr(item, "funcargs", {}).get("cluster") or getattr(item, "funcargs", {}).get("jobs")
    if report.when == "call" and report.failed and running is not None:
        report.sections.append(("SLURM", getattr(running, "cluster", running).describe()))
    return report
