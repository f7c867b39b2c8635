"""The checks before the process group: the job against the Trainer's settings, and the ranks against each other."""

from __future__ import annotations

import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

from lightning_shard import ConfigurationError
from lightning_shard.cluster import preflight
from lightning_shard.cluster.preflight import Rendezvous, compare_ranks, connect_store
from lightning_shard.cluster.slurm_job import Launch, check_launch, meeting_point, read_job
from tests.cluster.test_slurm import BATCH, STEP
from tests.harness import free_port, run_distributed


def _check(environ: dict[str, str], **settings: Any) -> None:
    launch = Launch(**{"nodes": 2, "devices": 2, "launcher": "slurm", "gpu": False, **settings})
    check_launch(read_job(environ), launch, environ)


@pytest.mark.parametrize("port", ["70000", "http"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MASTER_PORT is '{port}', but must be a port, from 1 to 65535"):
        _check({"MASTER_PORT": port}, launcher="torchrun")


TORCHRUN = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        (STEP, {}),
        (STEP | {"SLURM_GPUS_ON_NODE": "2"}, {"gpu": True}),
        (TORCHRUN, {"launcher": "torchrun", "devices": 8}),
        # A shell, and a batch script, in which Lightning starts the processes of one node.
        (BATCH | {"SLURM_JOB_NAME": "bash"}, {"launcher": "lightning", "nodes": 1}),
        (BATCH, {"nodes": 1, "devices": 1}),
    ],
    ids=["no job", "srun", "srun, GPUs", "torchrun", "shell", "script"],
)
def test_launches_that_are_right(environ: dict[str, str], settings: dict[str, Any]) -> None:
    _check(environ, **settings)


@pytest.mark.parametrize(
    ("environ", "settings", "says"),
    [
        (STEP, {"nodes": 3}, r"4 tasks of job 7 on 2 nodes \(gpu\[01-02\]\), but num_nodes is 3.*--nodes=3"),
        (STEP, {"devices": 4}, "devices is 4, .* needs 4 tasks on each node.*--ntasks-per-node=4"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, {}, "slurm needs 2 tasks on each node"),
        (STEP, {"launcher": "torchrun"}, "torchrun needs 1 tasks on each node.*--ntasks-per-node=1"),
        (BATCH, {}, r"without srun.*--nodes=2 --ntasks-per-node=2"),
        (STEP | {"SLURM_JOB_NAME": "bash"}, {"launcher": "lightning"}, "otherwise than 'bash', which Lightning takes"),
        (STEP | {"SLURM_GPUS_ON_NODE": "1"}, {"gpu": True}, "1 GPUs on this node.*--gpus-per-node=2"),
    ],
)
def test_launches_that_are_wrong(environ: dict[str, str], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        _check(environ, **settings)


def _point(environ: dict[str, str], launcher: str = "slurm") -> dict[str, str]:
    return meeting_point(read_job(environ), Launch(nodes=2, devices=2, launcher=launcher, gpu=False), environ)


def test_steps_and_jobs_meet_at_places_of_their_own() -> None:
    ports = set()
    for job in range(100, 150):
        for step in range(20):
            ports.add(_point(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"])
    assert len(ports) == 1000
    assert all(15000 <= int(port) < 32000 for port in ports)
    # The step's first node, not the job's.
    assert _point(STEP | {"SLURM_STEP_NODELIST": "gpu02"})["MASTER_ADDR"] == "gpu02"
    assert _point(STEP)["MASTER_ADDR"] == "gpu01"
    # What the user or another launcher chose stays.
    assert set(_point(STEP | {"MASTER_PORT": "29500"})) == {"MASTER_ADDR"}
    assert _point(STEP, "torchrun") == _point({}) == {}


def _place(port: int, rank: int, world_size: int, address: str = "127.0.0.1") -> Rendezvous:
    return Rendezvous(address=address, port=port, rank=rank, world_size=world_size)


def _compare(facts: dict[int, dict[str, Any]], folders: dict[int, str] | None = None, silent: int = -1) -> Any:
    """What each rank is told: "" or the error; the store is kept for as long as another rank may read it."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    box = [free_port()]
    torch.distributed.broadcast_object_list(box)
    place = _place(box[0], rank, size)
    store = connect_store(place, 20)
    # Connecting takes one rank longer than another, which is not what is waited for below.
    torch.distributed.barrier()
    if rank == silent:
        torch.distributed.barrier()
        return "silent"
    folder = None if folders is None else Path(folders.get(rank, "shared"))
    told = ""
    try:
        seconds = 20 if silent < 0 else 3
        compare_ranks(store, place, {"node": f"node{rank}", **facts.get(rank, {})}, seconds, folder)
        PrefixStore("default_pg", store).set(f"{rank}", "")  # it is usable afterwards
    except ConfigurationError as error:
        told = str(error)
    torch.distributed.barrier()
    return told


@pytest.mark.matrix
def test_ranks_that_are_alike_pass() -> None:
    same = {"versions": {"torch": "2.13"}, "settings": {"trainer.max_steps": "10"}}
    assert run_distributed(_compare, 2, {0: same, 1: same}, {}) == [""] * 2


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {rank: {"versions": {"torch": f"2.{rank % 2}"}} for rank in range(3)},
            "torch differs between ranks: 2.0 on rank 0 (node0), 2.1 on rank 1 (node1). Install",
        ),
        (
            {0: {"settings": {"trainer.max_steps": "10"}}},
            "trainer.max_steps differs between ranks: 10 on rank 0 (node0), none on ranks 1 (node1), 2 (node2). All",
        ),
    ],
)
def test_what_differs_is_said_on_every_rank(facts: dict[int, dict[str, Any]], says: str) -> None:
    told = run_distributed(_compare, 3, facts)
    assert told[0].startswith(says)
    assert told == [told[0]] * 3


def test_a_rank_that_is_missing_is_named_on_the_others() -> None:
    told = run_distributed(_compare, 3, {}, silent=1)
    assert told[0].startswith("1 of 3 ranks did not connect in 3 s (init_timeout_seconds): 1. They")
    assert told == [told[0], "silent", told[0]]


def _badly(how: str) -> str:
    """What a rank is told where rank 1 sees no folder, or the comparison itself fails."""
    box, rank = [free_port()], torch.distributed.get_rank()
    torch.distributed.broadcast_object_list(box)
    place = _place(box[0], rank, 2)
    store, told = connect_store(place, 20), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_FOLDER_SECONDS", 0.2)
        if how == "folder" and rank == 1:
            patch.setattr(preflight.os, "listdir", lambda path: [])
            patch.setattr(preflight.os.path, "exists", lambda path: False)
        if how == "error":
            patch.setattr(preflight, "multi_get", {}.__getitem__)
        try:
            compare_ranks(store, place, {"node": f"node{rank}"}, 20, Path("shared"))
        except (ConfigurationError, TypeError) as error:
            told = str(error)
    torch.distributed.barrier()
    return told


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "folder",
            ["shared is not one folder for all nodes: a file of rank 0 on node0 is not seen by rank 1"] * 2,
        ),
        ("error", ["dict.__getitem__", "rank 0 failed in comparing the ranks: TypeError: dict.__getitem__"]),
    ],
)
def test_ranks_that_can_not_be_compared(how: str, says: list[str]) -> None:
    for told, expected in zip(run_distributed(_badly, 2, how), says, strict=True):
        assert told.startswith(expected)


def test_a_folder_that_rank_0_can_not_write_is_left_to_the_save() -> None:
    assert preflight._make_probe(Path("/dev/null/runs")) is None


def _alone(place: Rendezvous, seconds: float) -> str:
    with pytest.raises(ConfigurationError) as caught:
        connect_store(place, seconds)
    return str(caught.value)


def test_a_name_that_is_no_host() -> None:
    told = _alone(_place(29501, 1, 2, address="nowhere.invalid"), 5)
    assert told.startswith("[rank 1 on ")
    assert "'nowhere.invalid' can't be resolved" in told
    assert "MASTER_ADDR" in told


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = _alone(_place(port, 0, 2), 5)
    assert f"port {port} can't be listened on" in told
    assert "Set MASTER_PORT to a free one" in told


def test_nobody_answers(capfd: pytest.CaptureFixture[str]) -> None:
    start, threads = time.monotonic(), threading.active_count()
    told = _alone(_place(free_port(), 1, 2), 3)
    # Not twice as long, as torch's store waits.
    assert 3 <= time.monotonic() - start < 6
    # A thread that waits in torch's store aborts a process that ends meanwhile.
    assert threading.active_count() <= threads
    assert "Exception raised from" not in capfd.readouterr().err
    assert "rank 0 did not answer at 127.0.0.1:" in told
    assert "in 3 s (init_timeout_seconds)" in told


def test_a_port_that_is_none_is_said() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_PORT is 70000, but must be from 1 to 65535"):
        connect_store(_place(70000, 1, 2), 1)


def test_the_limit_of_open_files_is_raised_or_said() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1500, hard))
    try:
        connect_store(_place(free_port(), 0, 500), 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2000, hard)
        with pytest.raises(ConfigurationError, match=rf"may have {hard} files open.*ulimit -n"):
            connect_store(_place(free_port(), 0, hard), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
