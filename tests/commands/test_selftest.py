"""The command that says whether a machine's engines agree: on processes of its own, and of a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shard.commands import selftest_runs
from tests.harness import run_distributed


def _lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


def _judge(name: str, factor: float, folder: str) -> tuple[str, str]:
    """Verdicts on a run like the reference, and on one with a fault in a loss."""
    settings = {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "default_root_dir": folder, "precision": "32-true"}
    reference, same, faulty = (
        selftest_runs.fit(n, settings, fault=f) for n, f in ((name, 1.0), (name, 1.0), (name, factor))
    )
    return selftest_runs.difference(same, reference), selftest_runs.difference(faulty, reference)


def test_a_fault_is_named_and_nothing_else_is() -> None:
    for same, faulty in run_distributed(_judge, 2, "shard_fsdp_aligned", 1 + 2**-12, "runs"):
        assert same == ""
        assert " by " in faulty


@pytest.mark.matrix
def test_alone_it_starts_two_processes_and_all_engines_agree(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lightning_shard", "selftest"]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    head, titles, *rows, last = _lines(ended.stdout)
    assert head == ["2 cpu processes, bf16-mixed, 6 steps, saved after 3"]
    assert titles == ["trains", "resumes", "switches"]
    assert [row[1:] for row in rows] == [["equal"] * 3] * 6 + [["found"]]
    assert last == ["all is equal"]
    assert list(tmp_path.iterdir()) == []
