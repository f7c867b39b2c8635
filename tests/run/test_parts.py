"""The parts of a run, each built and used without a Trainer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment, LSFEnvironment
from torch import nn

from lightning_shard import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    PreemptionConfig,
)
from lightning_shard.cluster.slurm_job import Launch
from lightning_shard.engines.engine import Engine, PlannedRun, Run
from lightning_shard.engines.fully_shard import FSDPOptions, FullyShard
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.mesh import MeshConfig, build_mesh
from lightning_shard.precision.policy import policy_from
from lightning_shard.run import (
    Checkpoints,
    DtypeLedger,
    FreezingCheck,
    Predictions,
    Processes,
    RunIdentity,
    RunMemory,
    RunWatch,
)
from lightning_shard.run.data import check_loader
from lightning_shard.run.full_tensors import read_full
from lightning_shard.run.process_group import count_run, launch_of
from tests.harness import free_port, run_distributed

CPU = torch.device("cpu")


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def prepared(module: nn.Module, precision: str = "32-true", *, fitting: bool = True) -> tuple[Engine, Run]:
    """``module`` sharded over all ranks, with AdamW in a fit."""
    ranks = dist.get_world_size()
    policy = policy_from(precision, aligned=True)
    planned = PlannedRun(ranks=ranks, per_node=ranks, policy=policy, aligned=True, device_type="cpu")
    engine = FullyShard(FSDPOptions(), ForwardOptions(), at_boundary=False)
    mesh = build_mesh((1, ranks), device_type="cpu")
    run = Run(planned=planned, device=CPU, mesh=mesh, seed=1, fitting=fitting)
    engine.prepare(module, run)
    if fitting:
        engine.attach_optimizers([torch.optim.AdamW(module.parameters(), lr=0.1)])
    return engine, run


def step(engine: Engine, module: nn.Module, batch: torch.Tensor) -> None:
    loss = engine.forward(lambda x: module(x).square().mean(), batch)
    engine.backward(loss, lambda value: value.backward(), overridden=False)
    engine.finish_gradients()
    for optimizer in engine.optimizers():
        engine.step_optimizer(optimizer, skip=False)  # type: ignore[arg-type]
        optimizer.zero_grad()  # type: ignore[union-attr]
    engine.reshard_and_sync_masters()


# Checkpoints and full tensors


def _saved_and_loaded(folder: str) -> tuple[list[bool], list[bool]]:
    first, second = net(), net(seed=4)
    engines = prepared(first)[0], prepared(second)[0]
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    step(engines[0], first, batch)
    full = []
    for engine, module in zip(engines, (first, second), strict=True):
        checkpoints = Checkpoints()
        checkpoints.attach_engine(module, engine, policy_from("32-true", aligned=True), None, root=folder)
        full.append((checkpoints, partial(read_full, engine, checkpoints, device=CPU)))
    writer, reader = full
    names = [name for name, _ in net().named_parameters()]

    def equal() -> list[bool]:
        return [torch.equal(writer[1](name), reader[1](name)) for name in names]  # type: ignore[arg-type]

    different = equal()
    state = {"state_dict": writer[0].state_dict(), "optimizer_states": [{}], "loops": {}}
    writer[0].save_checkpoint(state, f"{folder}/part.ckpt", run={"name": "x", "step": 1, "time": 0.0})
    loaded = reader[0].load_checkpoint(f"{folder}/part.ckpt")
    assert "optimizer_states" in loaded
    step(engines[1], second, batch)  # slots that loading fills
    reader[0].load_tensors(optimizers=True, strict=True)
    slots = [torch.equal(writer[1](n, "exp_avg"), reader[1](n, "exp_avg")) for n in names]  # type: ignore[arg-type]
    return different, equal() + slots


def test_checkpoints_of_an_engine(tmp_path: Path) -> None:
    for different, same in run_distributed(_saved_and_loaded, 2, str(tmp_path)):
        assert not any(different)
        assert all(same)
    assert (tmp_path / "part.ckpt" / "manifest.json").is_file()


def test_storage_options_of_a_path_are_refused() -> None:
    with pytest.raises(CheckpointError, match="storage_options is"):
        Checkpoints().save_checkpoint({}, "x.ckpt", {"compress": True})


# Identity


def test_an_identity_names_its_folders(tmp_path: Path) -> None:
    identity = RunIdentity.read(PreemptionConfig(run="mine"), {}, str(tmp_path))
    assert identity.own_path == tmp_path / "preempted" / "mine.ckpt"
    assert identity.failure_folder == tmp_path / "failures" / "mine"
    stored = RunIdentity.read(PreemptionConfig(run="mine"), {}, "memory://folder")
    assert str(stored.own_path) == "memory:///folder/preempted/mine.ckpt"
    assert stored.failure_folder is None
    assert identity.facts(7)["step"] == 7


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


def _mesh(replicate: int) -> tuple[tuple[int, ...], int]:
    processes, environment = Processes(MeshConfig(replicate=replicate), 60, 60, None), LightningEnvironment()
    environment.set_world_size(dist.get_world_size())
    environment.set_global_rank(dist.get_rank())
    launch = Launch(nodes=1, devices=dist.get_world_size(), launcher="lightning", gpu=False)
    processes.connect(environment, launch, CPU, settings={}, root=None)
    mesh = processes.lay_mesh(per_node=dist.get_world_size())
    processes.barrier()
    return tuple(mesh.shape), processes.data_parallel_coordinates[1]


def test_processes_lay_a_mesh() -> None:
    assert run_distributed(_mesh, 2, 2) == [((2, 1), 0), ((2, 1), 1)]


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


def test_a_watch_has_torch_write_its_record_beside_the_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_FR_DUMP_TEMP_FILE"
    monkeypatch.setenv(name, "")  # put back at the end
    monkeypatch.delenv(name)
    RunWatch(None, None, os._exit).record_collectives_into(tmp_path)
    assert name not in os.environ  # Nobody waits for lost ranks.
    RunWatch(60.0, None, os._exit).record_collectives_into(tmp_path)
    assert Path(os.environ[name]).parent == tmp_path


# Ledger, freezing, memory, data


def _ledger() -> str:
    module = net()
    ranks = dist.get_world_size()
    policy = policy_from("bf16-mixed", aligned=True)
    engine = FullyShard(FSDPOptions(), ForwardOptions(), at_boundary=False)
    ledger = DtypeLedger(module, engine, policy, aligned=True)
    planned = PlannedRun(ranks=ranks, per_node=ranks, policy=policy, aligned=True, device_type="cpu")
    mesh = build_mesh((1, ranks), device_type="cpu")
    run = Run(planned=planned, device=CPU, mesh=mesh, seed=1, fitting=True)
    engine.prepare(module, run)
    (optimizer,), _ = engine.attach_optimizers([torch.optim.AdamW(module.parameters(), lr=0.1)])
    ledger.read_prepared([optimizer])

    def closure() -> None:
        loss = engine.forward(lambda x: module(x).float().square().mean(), torch.ones(2, 4))
        engine.backward(loss, lambda value: value.backward(), overridden=False)
        ledger.read_backward(loss, accumulates=False)
        engine.finish_gradients()

    def stepping(closure: Callable[[], Any]) -> None:
        closure()
        optimizer.step()

    ledger.run_step(optimizer, closure, stepping)
    found = ledger.measured()
    assert found.loss == found.reduced_in == {torch.float32}
    return ",".join(sorted(str(dtype) for dtype in found.dtypes("0.weight", "gradient")))


def test_a_ledger_of_a_plain_loop() -> None:
    assert run_distributed(_ledger, 2) == ["torch.float32"] * 2


def test_freezing_is_seen_once_and_needs_masters() -> None:
    module = net()
    module[0].to(torch.bfloat16).requires_grad_(False)
    freezing = FreezingCheck(module, frozen_too=False, named=False)
    assert not freezing.trainable_changed(1)
    module[2].requires_grad_(False)
    assert freezing.trainable_changed(1)
    freezing.refuse_without_masters(torch.float32)
    assert not freezing.trainable_changed(1)
    module[0].requires_grad_(True)
    assert freezing.trainable_changed(1)
    with pytest.raises(ConfigurationError, match="2 parameters were thawed"):
        freezing.refuse_without_masters(torch.float32)


@pytest.mark.parametrize("frozen_too", [True, False])
def test_parameters_that_come_later_are_refused_at_the_first_look(frozen_too: bool) -> None:
    module = net()
    freezing = FreezingCheck(module, frozen_too=frozen_too, named=False)
    module[1] = nn.Linear(6, 6).requires_grad_(False)
    module[2].bias = nn.Parameter(torch.zeros(2))
    named = "1.weight, 1.bias, 2.bias came" if frozen_too else "2.bias came"
    with pytest.raises(ConfigurationError, match=f"^{named} after the model was set up to train"):
        freezing.trainable_changed(1)


@pytest.mark.parametrize("named", [True, False])
def test_new_names_are_refused_where_engines_go_by_names(named: bool) -> None:
    module = net()
    freezing = FreezingCheck(module, frozen_too=False, named=named)
    module[0], module[2] = module[2], module[0]
    with (
        pytest.raises(ConfigurationError, match=r"0.weight \(2.weight now\), .* got other names")
        if named
        else nullcontext()
    ):
        freezing.trainable_changed(1)


def _memory() -> tuple[int, int]:
    module = net()
    engine, run = prepared(module)
    memory = RunMemory(module, engine, run.planned, device=CPU, recomputes=False)
    before = memory.account().device
    step(engine, module, torch.ones(3, 4))
    return before.parameters, memory.account().device.optimizer


def test_memory_counts_shards() -> None:
    # 4*6 + 6 and 6*2 + 2 elements of 4 bytes, each tensor cut in two (dim 0 is even); two moments and a step count.
    half = (24 + 6 + 12 + 2) // 2 * 4
    for parameters, optimizer in run_distributed(_memory, 2):
        assert parameters == half
        assert optimizer == 2 * half + 4 * 4


def _predictions(own: list[int]) -> int:
    ran: list[int] = []
    predictions = Predictions(own[dist.get_rank()])
    for index in range(own[dist.get_rank()]):
        assert predictions.run_step(lambda index=index: ran.append(index) or index) == index
    return len(ran)


def test_ranks_with_fewer_predictions_go_on_with_the_others() -> None:
    assert run_distributed(_predictions, 2, [2, 5]) == [5, 5]


def test_a_loader_of_one_process_is_taken_as_it_is() -> None:
    loader = [1, 2]
    assert check_loader(loader, "training") is loader
