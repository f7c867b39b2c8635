"""Stock Lightning's files: every name and argument of its strategies is known."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import strategies
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_shard import registry
from lightning_shard.migrate.lightning_strategies import STRATEGIES
from tests.groups import sampled
from tests.migrate.support import BASE, FILES, arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Migrated = Callable[..., dict[str, Any]]
Told = Callable[..., str]
LIGHTNING = sorted(path for path in (FILES / "lightning").glob("*.yaml") if path.stem != "base")


@pytest.mark.parametrize("path", LIGHTNING, ids=lambda path: path.stem)
def test_every_lightning_file_carries_the_rest_over(path: Path, migrated: Migrated) -> None:
    before, after = yaml.safe_load(BASE.read_text()), migrated(BASE, path, "--lossy")
    assert list(after)[:4] == ["seed_everything", "trainer", "model", "data"]
    for key in ("seed_everything", "model", "data"):
        assert _contains(after[key], before[key])
    assert _contains(after["trainer"], {key: value for key, value in before["trainer"].items() if key != "callbacks"})
    assert "shard" in str(after["trainer"]["strategy"])


def _contains(after: Any, before: Any) -> bool:
    """Whether everything is still there. A file laid over another may have more."""
    if isinstance(before, dict):
        return all(key in after and _contains(after[key], value) for key, value in before.items())
    return bool(after == before)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_stock_argument_is_known(kind: str) -> None:
    parameters = inspect.signature(getattr(strategies, kind)).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert named <= set(STRATEGIES[kind][1])
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        assert named == set(STRATEGIES[kind][1])
    # They pass others on.
    engine = {"DDPStrategy": DistributedDataParallel, "FSDPStrategy": FullyShardedDataParallel}.get(kind)
    if engine is not None:
        assert set(inspect.signature(engine).parameters) - {"module"} <= set(STRATEGIES[kind][1])


# Without other devices'.
STOCK = sorted({"auto", *(n for n in StrategyRegistry if not re.match("shard_|xla|single_xla|single_tpu|hpu", n))})
assert not {*STOCK} & {*registry.PRESETS}


@pytest.mark.parametrize("name", sampled(STOCK, *range(0, len(STOCK), 3)))
def test_every_stock_name(name: str, migrated: Migrated) -> None:
    result = migrated(trainer(name))
    expected = {
        "auto": "shard_ddp",
        "ddp": "shard_ddp",
        "fsdp": "shard_fsdp",
        "fsdp_cpu_offload": "shard_fsdp_offload",
        "deepspeed": "shard_deepspeed_stage_2",
    }.get(name, f"shard_{name}")
    if name.startswith("deepspeed") and "nvme" not in name:
        assert result["trainer"]["strategy"] == expected
    unused = "unused_parameters_true" in name
    assert arguments(result).get("find_unused_parameters", False) is unused
    start = next((word for word in ("spawn", "fork") if word in name), "fork" if "notebook" in name else "popen")
    assert arguments(result).get("start_method", "popen") == start


@pytest.mark.parametrize(
    ("strategy", "precision", "expected"),
    [
        ("deepspeed_stage_3", "bf16-true", "bf16-mixed"),
        ("deepspeed_stage_3", "16-true", "16-mixed"),
        ("fsdp", "bf16-true", "bf16-true"),
        ("ddp", 32, "32-true"),
    ],
)
def test_precision_means_the_same_masters(strategy: str, precision: Any, expected: str, migrated: Migrated) -> None:
    assert migrated(trainer(strategy, precision=precision))["trainer"]["precision"] == expected


def test_stock_classes(migrated: Migrated, table: Told) -> None:
    assert arguments(migrated(BASE, FILES / "lightning" / "fsdp_class.yaml")) == {
        "mesh": {"replicate": 2, "shard": 1},
        "units": ["Block"],
        "forward_prefetch": 1,
        "timeout_seconds": 1200.0,
        "activation_checkpointing": ["Block"],
    }
    offload = {"class_path": "torch.distributed.fsdp.CPUOffload", "init_args": {"offload_params": True}}
    assert migrated(trainer("FSDPStrategy", {"cpu_offload": offload}))["trainer"]["strategy"] == "shard_fsdp_offload"
    alone = trainer("SingleDeviceStrategy")
    del alone["trainer"]["devices"]
    assert migrated(alone)["trainer"]["devices"] == 1
    assert migrated(trainer("DeepSpeedStrategy", {"zero_optimization": False}))["trainer"]["strategy"] == "shard_ddp"
    parallel = trainer("ModelParallelStrategy", {"tensor_parallel_size": 1}, precision="bf16-mixed")
    assert "autocast is not used" in table(parallel)


def test_stock_deepspeed_class(migrated: Migrated, refused: Told, table: Told) -> None:
    path = "lightning.pytorch.strategies.DeepSpeedStrategy"
    result = migrated(trainer(path, {"offload_optimizer": True, "partition_activations": False, "single_submit": True}))
    assert arguments(result) == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "config": {"aio": {"single_submit": True}},
    }
    assert "deepspeed.checkpointing.configure" in table(trainer(path, {"cpu_checkpointing": True}))
    message = refused(trainer(path, {"config": {"zero_optimization": {"stage": 1}}, "stage": 3, "stagee": 1}))
    assert "given with config, so Lightning does not read them" in message
    assert "stagee is no key of DeepSpeedStrategy: the nearest is 'stage'" in message
    assert "the loss scale is dynamic" in refused(trainer(path, {"loss_scale": 64.0}))


def test_a_stock_precision_plugin_is_the_precision(migrated: Migrated, refused: Told) -> None:
    def given(**more: Any) -> dict[str, Any]:
        own = {"precision": "16-mixed", "device": "cuda", **more}
        mixed = {"class_path": "lightning.pytorch.plugins.MixedPrecision", "init_args": own}
        return trainer("ddp", plugins=[mixed, "my.Plugin"])

    result = migrated(given())["trainer"]
    assert (result["precision"], result["plugins"]) == ("16-mixed", ["my.Plugin"])
    assert "the loss scale is this package's own" in refused(given(scaler="torch.amp.GradScaler"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (trainer(7), "must be the name or the class of a strategy"),
        (trainer("shard_fspd"), "the nearest is 'shard_fsdp'"),
        (trainer("DeepSpeedStrategy", {"stage": 5}), "stage is '5', but must be one of 0, 1, 2, 3"),
        (trainer("DeepSpeedStrategy", {"config": 5}), "5, but must be the path of"),
        (trainer("FSDPStrategy", {"auto_wrap_policy": "my.policy"}), "a function, which YAML can't carry over"),
        (trainer("FSDPStrategy", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2]}), "must be two numbers"),
        (trainer("FSDPStrategy", {"device_mesh": [2, 1]}), "goes with sharding_strategy HYBRID_SHARD"),
        (trainer("lightning_shard.ShardFSDPStrategy", {"reshard_after_forward": "maybe"}), "reshard_after_forward"),
        (trainer("ddp", precision=64), "precision: 64"),
    ],
)
def test_wrong_values(given: dict[str, Any], expected: str, refused: Told) -> None:
    assert expected in refused(given)


def test_ddp_options_of_32_true_alone(migrated: Migrated, refused: Told) -> None:
    content = trainer("pytorch_lightning.strategies.DDPStrategy", {"static_graph": True, "broadcast_buffers": False})
    assert arguments(migrated(content)) == {"static_graph": True, "broadcast_buffers": False}
    content["trainer"]["precision"] = "bf16-mixed"
    assert refused(content).count("for 32-true") == 2
