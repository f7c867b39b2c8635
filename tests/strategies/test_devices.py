"""What runs on GPUs are made of, seen without one: devices, LOCAL_RANK, and how long each group waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule

from lightning_shard.commands import doctor
from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.zero.values import ParameterValues
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import build_mesh
from lightning_shard.precision.policy import policy_from
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from tests.harness import run_distributed
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


@pytest.mark.usefixtures("alone")
def test_doctor_says_where_gloo_listens_that_connects_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist, "all_gather_object", fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    seen = doctor.Rank(node="n1", device="a GPU", versions={})
    with pytest.raises(ConfigurationError, match=r"rank 0 on n1\] gloo.*listens on eth7.*connectFullMesh"):
        doctor._gather_over_gloo(seen, 1.0)


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
