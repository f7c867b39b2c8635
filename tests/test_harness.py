"""The harness: results by rank, and no failure, death or hang of a rank goes unseen or holds up the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import ROOT, DistributedError, run_distributed

# Well below the 60 s and more that a hang would take; a busy machine needs seconds to notice a dead peer.
PROMPT_SECONDS = 30


def _identity(offset: int, *, scale: int = 1) -> dict[str, object]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "total": total.item() * scale,
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "threads": torch.get_num_threads(),
    }


def _raise_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        print("its last words", flush=True)
        raise KeyError("only rank 1")
    dist.barrier()


def test_one_rank_raising_ends_a_waiting_one() -> None:
    run_distributed(_identity, 2, 0)  # the start of the processes is not in the time below
    began = time.monotonic()
    with pytest.raises(DistributedError, match=r"failed; rank 1: KeyError: ") as caught:
        run_distributed(_raise_while_the_other_waits, 2, timeout=100)
    assert time.monotonic() - began < PROMPT_SECONDS
    assert caught.value.failed[1] == "KeyError"
    assert set(caught.value.failed) == {0, 1}
    raised, waited = str(caught.value).split("--- rank 0", 1)
    assert "in _raise_while_the_other_waits" in waited
    assert "its last words" in raised


def _one_rank_hangs() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return dist.get_rank()


def test_a_hang_shows_stacks_and_the_next_call_works() -> None:
    with pytest.raises(DistributedError, match="did not end within 2 s") as caught:
        run_distributed(_one_rank_hangs, 2, timeout=2)
    assert caught.value.failed == {1: "did not end"}
    assert "in _one_rank_hangs" in str(caught.value)
    assert [result["total"] for result in run_distributed(_identity, 2, 0)] == [1, 1]


GROUPED_TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.matrix
def test_matrix(): pass

@pytest.mark.matrix
@pytest.mark.soak
def test_matrix_soak(): pass

@pytest.mark.slurm
def test_slurm(): pytest.skip("no")
"""


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_grouped.py").write_text(GROUPED_TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


@pytest.mark.matrix
def test_marked_groups_are_left_out_aloud_and_fail_where_required(tmp_path: Path) -> None:
    run = _pytest(tmp_path, "--require-groups=matrix")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "`matrix` was required and ran no test" in run.stdout
    assert "1 passed, 3 deselected" in run.stdout
    assert "2 tests of `matrix` not selected: run `pytest -m matrix`" in run.stdout
    assert "1 tests of `slurm` not selected: run `pytest -m slurm`" in run.stdout
