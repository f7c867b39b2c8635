"""What is read from a SLURM job's environment; the mappings are those of real jobs (SLURM 22.05)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_shard.cluster.slurm_job import (
    expand_counts,
    first_node,
    is_cancelled,
    parse_time,
    read_job,
    requeue,
    shows_cancelled,
    time_left,
)

# srun --nodes 2 --ntasks-per-node 2 in a batch job, on its second node.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "3",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# The batch script of the same job: no step, no rank.
BATCH = {k: v for k, v in STEP.items() if "STEP" not in k and k != "SLURM_RESTART_COUNT"} | {"SLURM_PROCID": "0"}


def test_a_task() -> None:
    job = read_job(STEP)
    assert job is not None
    assert (job.label, job.step, job.rank, job.restarts, job.name) == ("7", "0", 3, 1, "train")
    assert (job.nodes, job.tasks, job.tasks_per_node, job.node_list) == (2, 4, (2, 2), "gpu[01-02]")
    assert job.uses_srun


def test_the_batch_script() -> None:
    job = read_job(BATCH)
    assert job is not None
    assert not job.uses_srun
    assert (job.nodes, job.tasks, job.restarts) == (2, 4, 0)


def test_an_array_task_is_named_by_array_and_task() -> None:
    # The last task of an array has the array's own id: plain, it would mean all of them.
    job = read_job(STEP | {"SLURM_JOB_ID": "68", "SLURM_ARRAY_JOB_ID": "68", "SLURM_ARRAY_TASK_ID": "3"})
    assert job is not None
    assert job.label == "68_3"


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", (2,)), ("4(x2),2", (4, 4, 2)), ("2(x", None)],
)
def test_counts(text: str, counts: tuple[int, ...] | None) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a1,b2", "a1"),
        ("gpu[08-10].cluster", "gpu08.cluster"),
        ("r[1-2]n[1,3]", "r1n1"),
        ("", ""),
    ],
)
def test_the_first_node(text: str, name: str) -> None:
    assert first_node(text) == name


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3:04", 184),
        ("02:03:04", 7384),
        ("1-02:03:04", 93784),
        ("1-02", 93600),
        ("5", 300),
        ("UNLIMITED", None),
    ],
)
def test_times(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("state", "run", "limit", "cancelled"),
    [
        ("RUNNING", "00:00:04", "UNLIMITED", False),  # scancel --signal=TERM, and a preemption's grace time
        ("COMPLETING", "00:00:04", "365-00:00:00", True),  # scancel, scontrol requeue
        ("COMPLETING", "00:00:04", "UNLIMITED", True),
        ("COMPLETING", "00:01:02", "00:01:00", False),  # the time limit
        ("CANCELLED", "00:00:04", "00:01:00", True),
    ],
)
def test_a_job_that_is_cancelled_is_told_from_one_that_is_stopped(
    state: str, run: str, limit: str, cancelled: bool
) -> None:
    shown = (
        f"JobId=1 JobName=a b UserId=root(0) JobState={state} Reason=None Requeue=1 RunTime={run} TimeLimit={limit} "
    )
    assert shows_cancelled(shown + "TimeMin=N/A Command=/x.sh --a=b") is cancelled


def test_without_slurms_commands_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = read_job(STEP)
    assert job is not None
    assert (time_left(job), is_cancelled(job)) == (None, False)
    assert str(requeue(job)).startswith("scontrol: [Errno 2] No such file")
