"""The parts of a run, each built and used without a Trainer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment, LSFEnvironment

from lightning_shard import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    PreemptionConfig,
)
from lightning_shard.mesh import MeshConfig
from lightning_shard.run import (
    Checkpoints,
    Predictions,
    Processes,
    RunIdentity,
)
from lightning_shard.run.process_group import count_run, launch_of
from tests.harness import free_port, run_distributed

CPU = torch.device("cpu")


def test_storage_options_of_a_path_are_refused() -> None:
    with pytest.raises(CheckpointError, match="storage_options is"):
        Checkpoints().save_checkpoint({}, "x.ckpt", {"compress": True})


# Identity


def test_an_identity_finds_no_checkpoint(tmp_path: Path) -> None:
    identity = RunIdentity.read(PreemptionConfig(run="mine"), {}, str(tmp_path))
    assert identity.choose_checkpoint(None, fitting=True, folders=[]) is None
    assert identity.choose_checkpoint("auto", fitting=True, folders=[tmp_path]) is None
    assert identity.choose_checkpoint("a.ckpt", fitting=True, folders=[]) == "a.ckpt"
    with pytest.raises(ConfigurationError, match=r"this run has no name.*set preemption: \{run: NAME\}"):
        RunIdentity(root=str(tmp_path)).choose_checkpoint("auto", fitting=True, folders=[tmp_path])
    with pytest.raises(CheckpointNotFoundError, match="run mine"):
        identity.choose_checkpoint("auto", fitting=False, folders=[tmp_path])
    with pytest.raises(CheckpointError, match="Lightning chose"):
        identity.choose_checkpoint(tmp_path / "hpc_ckpt_3.ckpt", fitting=True, folders=[])


# Processes and watch


def _met(kind: str) -> tuple[Any, ...]:
    """Where and as whom this rank meets the others."""
    rank, size, box = dist.get_rank(), dist.get_world_size(), [free_port()]
    dist.broadcast_object_list(box)
    os.environ |= {"MASTER_PORT": str(box[0]), "LSB_JOBID": "7", "LSB_DJOB_RANKFILE": f"ranks-{rank}"}
    os.environ |= {"JSM_NAMESPACE_LOCAL_RANK": "0", "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": str(size)}
    Path(f"ranks-{rank}").write_text("launch\n" + f"{socket.gethostname()}\n" * size)
    environment: Any = ENVIRONMENTS[kind]()
    if kind == "plain":
        environment.set_world_size(size)
        environment.set_global_rank(rank)
    launch = launch_of(environment, nodes=size, devices=1, gpu=False)
    dist.destroy_process_group()
    Processes(MeshConfig(), 60, 60, None).connect(environment, launch, CPU, settings={}, root=None)
    met = count_run()
    assert met is not None
    place, _ = met
    return place.rank, place.world_size, place.port == box[0], place.agent


ENVIRONMENTS = {"kubeflow": KubeflowEnvironment, "lsf": LSFEnvironment, "plain": LightningEnvironment}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_processes_meet_by_the_variables_of_other_launchers(kind: str) -> None:
    assert run_distributed(_met, 2, kind) == [(rank, 2, True, None) for rank in range(2)]


def _predictions(own: list[int]) -> int:
    ran: list[int] = []
    predictions = Predictions(own[dist.get_rank()])
    for index in range(own[dist.get_rank()]):
        assert predictions.run_step(lambda index=index: ran.append(index) or index) == index
    return len(ran)


def test_ranks_with_fewer_predictions_go_on_with_the_others() -> None:
    assert run_distributed(_predictions, 2, [2, 5]) == [5, 5]
