"""The command that says whether a machine's engines agree: on processes of its own, and of a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shard.commands import selftest, selftest_runs
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


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([((1.0, 2.0), "d"), ((3.0, 4.0), "d")], ""),
        ([((2.0,), "d"), ((4.0,), "d")], ""),  # of a resumed run
        ([((1.0, 2.5), "d"), ((3.0, 4.0), "d")], "a loss by 5.0e-01"),
        ([((1.0, 2.0), "d"), ((3.0, 4.0), "e")], "ranks have other tensors"),
        ([((1.0, 2.0), "d"), ((1.0, 2.0), "d")], "ranks read the same batches"),
    ],
)
def test_what_differs_is_said_of_every_rank(ranks: list[tuple[tuple[float, ...], str]], says: str) -> None:
    run, reference = selftest_runs.Run(Path()), selftest_runs.Run(Path())
    run.ranks, reference.ranks = ranks, [((1.0, 2.0), "d"), ((3.0, 4.0), "d")]
    assert selftest_runs.difference(run, reference) == says


def _refused(folder: str) -> list[tuple[str, ...]]:
    settings = {
        "num_nodes": 1,
        "devices": 1,
        "accelerator": "cpu",
        "default_root_dir": folder,
        "precision": "16-true",
    }
    return [*selftest_runs._rows(["shard_deepspeed_stage_2"], settings, 1)]


def test_a_name_that_can_not_run_is_a_line(tmp_path: Path) -> None:
    ((name, told),) = run_distributed(_refused, 1, str(tmp_path))[0]
    assert name == "shard_deepspeed_stage_2"
    assert told.startswith("refused: masters are fp16 with DeepSpeed stage 2")


@pytest.mark.matrix
def test_alone_it_starts_two_processes_and_all_engines_agree(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lightning_shard", "selftest"]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    head, titles, *rows, last = _lines(ended.stdout)
    assert head == ["2 cpu processes, bf16-mixed, 6 steps, saved after 3"]
    assert titles == ["loop", "trains", "resumes", "switches"]
    assert [row[1:] for row in rows] == [["equal"] * 4] * 6 + [["found"]]
    assert last == ["all is equal"]
    assert list(tmp_path.iterdir()) == []


def test_tasks_of_srun_are_its_processes() -> None:
    job = {"JOB_ID": "7", "NTASKS": "4", "NNODES": "2", "NODELIST": "n[0-1]", "STEP_ID": "0", "PROCID": "1"}
    environ = {f"SLURM_{name}": value for name, value in job.items()}
    settings = selftest_runs._settings(selftest.parser().parse_args(["--accelerator=cpu"]), environ)
    assert (settings["num_nodes"], settings["devices"]) == (2, 2)
