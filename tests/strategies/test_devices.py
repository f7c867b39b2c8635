"""What runs on GPUs are made of, seen without one: devices, LOCAL_RANK, and how long each group waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import accelerator
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule

from lightning_shard.cluster.preflight import Rendezvous
from lightning_shard.cluster.slurm_job import Launch
from lightning_shard.commands import doctor
from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.zero.connection import connect_deepspeed
from lightning_shard.engines.zero.running_engine import start_engine
from lightning_shard.engines.zero.values import ParameterValues
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig, build_mesh
from lightning_shard.precision.policy import policy_from
from lightning_shard.run import process_group as run_processes
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from tests.harness import free_port, run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, and its environment and accelerator as they were afterwards."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = accelerator.get_accelerator()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    accelerator.set_accelerator(before)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("local_rank", "indices"), [(None, [1]), ("1", [2, 3])])
def test_deepspeed_computes_on_the_device_of_the_trainer(
    local_rank: str | None, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    strategy = ShardDeepSpeedStrategy(stage=3)
    strategy.parallel_devices = [torch.device("cuda", index) for index in indices]
    strategy.cluster_environment = LightningEnvironment()
    device = torch.device("cuda", indices[-1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device.index)  # as Lightning sets it
    connection = connect_deepspeed(
        strategy.root_device,
        backend="gloo",
        local_rank=strategy.local_rank,
        local_size=len(indices),
        timeout=timedelta(seconds=60),
    )
    try:
        assert strategy.root_device == device
        # How zero.Init and the checks of stage 3 find their device.
        assert accelerator.get_accelerator().device_name(os.environ["LOCAL_RANK"]) == str(device)
        given: dict[str, Any] = {}
        monkeypatch.setattr(deepspeed, "initialize", lambda **kwargs: given.update(kwargs))
        with pytest.raises(TypeError):  # nothing was initialized
            start_engine(nn.Linear(2, 2), optimizer=None, config={}, names={}, device=device)
        devices: list[int] = []
        monkeypatch.setattr(torch.cuda, "set_device", devices.append)
        engine = object.__new__(deepspeed.DeepSpeedEngine)
        engine._configure_with_arguments(given["args"], None)
        engine._set_distributed_vars(given["args"])
        assert (devices, engine.device) == ([device.index], device)
    finally:
        connection.disconnect()


def test_the_device_has_no_loaded_values_while_deepspeed_makes_its_copies() -> None:
    with FakeTensorMode():
        module = nn.ParameterList(torch.zeros(4, device="cuda") for _ in range(2))
        values = ParameterValues(module)
        values.cast_parameters(torch.bfloat16)
    assert {part.data.device.type for part in values.loaded.values()} == {"cpu"}
    assert values.loaded.keys() == dict(module.named_parameters()).keys()


@pytest.mark.usefixtures("alone")
def test_symmetric_memory_is_asked_of_torch_for_every_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    monkeypatch.setattr(FSDPModule, "set_symm_mem_for_comm", lambda unit: asked.append(unit))  # NCCL's
    strategy = ShardFSDPStrategy(symmetric_memory=True, units=["Linear"])
    planned = PlannedRun(ranks=1, per_node=1, policy=policy_from("32-true", aligned=False))
    engine, module = strategy.engine_for(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    engine.check(planned)
    mesh = build_mesh((1, 1), device_type="cpu")
    engine.prepare(module, Run(planned=planned, device=torch.device("cpu"), mesh=mesh, seed=1, fitting=True))
    engine.release_module(failed=False)
    assert asked == [module, *module]


def test_doctor_uses_a_device_of_its_own_and_gathers_256_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.accelerator, "set_device_index", seen.append)
    monkeypatch.setattr(doctor, "connect_store", lambda place, seconds: dist.HashStore())
    monkeypatch.setattr(doctor, "compare_ranks", lambda *args: [])
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: None)
    for name in ("_adds_up", "_measure_link", "_measure_device"):
        monkeypatch.setattr(doctor, name, lambda device: 0)
    monkeypatch.setattr(doctor, "_gather_over_gloo", lambda own, seconds: [own])

    def gathers(device: torch.device, megabytes: int, nodes: list[str]) -> None:
        seen.append((device, megabytes, len(nodes)))
        raise KeyboardInterrupt  # further than this there is no way without GPUs

    monkeypatch.setattr(doctor, "_measure_gathers", gathers)
    at = Rendezvous(address="127.0.0.1", port=free_port(), rank=2, world_size=4)
    with pytest.raises(KeyboardInterrupt):
        doctor.examine_processes(at, 2, doctor.parser().parse_args(["--seconds=1"]))
    assert seen == [torch.device("cuda", 2), (torch.device("cuda", 2), 256, 1)]
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"  # gloo was prepared


@pytest.mark.usefixtures("alone")
def test_doctor_says_where_gloo_listens_that_connects_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist, "all_gather_object", fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    seen = doctor.Rank(node="n1", device="a GPU", versions={})
    with pytest.raises(ConfigurationError, match=r"rank 0 on n1\] gloo.*listens on eth7.*connectFullMesh"):
        doctor._gather_over_gloo(seen, 1.0)


def test_a_run_prepares_gloo_ahead_of_its_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def stop(environment: Any, backend: str, **options: Any) -> None:
        seen.append((backend, os.environ["TORCH_GLOO_LAZY_INIT"]))
        raise KeyboardInterrupt  # further than this there is no way without GPUs

    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(run_processes, "connect_store", lambda place, seconds: dist.HashStore())
    monkeypatch.setattr(run_processes, "compare_ranks", lambda *args: [])
    monkeypatch.setattr(run_processes.processes, "init_process_group", stop)
    environment = LightningEnvironment()
    environment.set_world_size(2)
    launch = Launch(nodes=1, devices=2, launcher="lightning", gpu=True)
    connecting = run_processes.Processes(MeshConfig(), 60.0, 60.0, None)
    with pytest.raises(KeyboardInterrupt):
        connecting.connect(environment, launch, torch.device("cuda", 0), settings={}, root=None)
    assert seen == [("nccl", "1")]


def test_doctor_times_a_device_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes on while a device works."""
    done: list[str] = []

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert (device.type, enable_timing) == ("cuda", True)

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 250.0 if done == ["record", "act", "record", "wait"] and other is not self else 0.0

    monkeypatch.setattr(torch, "Event", Event)
    assert doctor._measure_seconds(torch.device("cuda"), lambda: done.append("act")) == 0.25


def timeouts(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds that the groups wait which a run made beside the default one, by their description."""
    known = set(_world.pg_map)
    trainer = quiet_trainer(
        strategy=ENGINES[name](timeout_seconds=77.0, async_save=True, **options),
        max_steps=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=".", every_n_train_steps=1)],
    )
    trainer.fit(TinyLM(), loader())
    made = [group for group in _world.pg_map if group not in known]
    of_groups = {g.group_name: g._get_backend(g._device_types[0]).options for g in made}
    return {name: options._timeout.total_seconds() for name, options in of_groups.items()}


@pytest.mark.parametrize(("name", "options"), [("hybrid_1x2", {"separate_reduce_scatter": True}), ("zero_2", {})])
def test_all_groups_of_a_run_wait_as_long_as_the_default_one(name: str, options: dict[str, Any]) -> None:
    for found in run_distributed(timeouts, 2, name, options):
        assert len(found) > len(options)
        assert set(found.values()) == {77.0}
