"""Stock Lightning's files: every name and argument of its strategies is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_shard import registry
from lightning_shard.migrate.lightning_strategies import STRATEGIES
from tests.migrate.support import BASE, FILES, arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


LIGHTNING = sorted(path for path in (FILES / "lightning").glob("*.yaml") if path.stem != "base")


# Stock Lightning


@pytest.mark.parametrize("path", LIGHTNING, ids=lambda path: path.stem)
def test_every_lightning_file_carries_the_rest_over(path: Path, migrated: Callable[..., dict[str, Any]]) -> None:
    before, after = yaml.safe_load(BASE.read_text()), migrated(BASE, path, "--lossy")
    assert list(after)[:4] == ["seed_everything", "trainer", "model", "data"]
    for key in ("seed_everything", "model", "data"):
        assert _contains(after[key], before[key])
    assert _contains(after["trainer"], {key: value for key, value in before["trainer"].items() if key != "callbacks"})
    assert "shard" in str(after["trainer"]["strategy"])


def _contains(after: Any, before: Any) -> bool:
    """Whether everything that was there still is; a file laid over another may have more."""
    if isinstance(before, dict):
        return all(key in after and _contains(after[key], value) for key, value in before.items())
    return bool(after == before)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_stock_argument_is_known(kind: str) -> None:
    import inspect

    from lightning.pytorch import strategies

    signature = inspect.signature(getattr(strategies, kind)).parameters.values()
    named = {p.name for p in signature if p.kind is not p.VAR_KEYWORD}
    assert named <= set(STRATEGIES[kind][1])
    if not any(p.kind is p.VAR_KEYWORD for p in signature):
        assert named == set(STRATEGIES[kind][1])
    # What the others pass on.
    engine = {"DDPStrategy": DistributedDataParallel, "FSDPStrategy": FullyShardedDataParallel}.get(kind)
    if engine is not None:
        assert set(inspect.signature(engine).parameters) - {"module"} <= set(STRATEGIES[kind][1])


STOCK = {name for name in StrategyRegistry if name not in registry.PRESETS}
# But those of other devices.
STOCK = {"auto", *(name for name in STOCK if not re.match("xla|single_xla|single_tpu|hpu", name))}


@pytest.mark.parametrize("name", sorted(STOCK))
def test_every_stock_name(name: str, migrated: Callable[..., dict[str, Any]]) -> None:
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
        ("deepspeed_stage_3", "bf16", "bf16-mixed"),
        ("fsdp", "bf16-true", "bf16-true"),
        ("ddp", 32, "32-true"),
        ("ddp", "16", "16-mixed"),
    ],
)
def test_precision_means_the_same_masters(
    strategy: str, precision: Any, expected: str, migrated: Callable[..., dict[str, Any]]
) -> None:
    assert migrated(trainer(strategy, precision=precision))["trainer"]["precision"] == expected


def test_stock_fsdp_class(migrated: Callable[..., dict[str, Any]]) -> None:
    result = migrated(BASE, FILES / "lightning" / "fsdp_class.yaml")
    assert arguments(result) == {
        "mesh": {"replicate": 2, "shard": 1},
        "units": ["Block"],
        "forward_prefetch": 1,
        "timeout_seconds": 1200.0,
        "activation_checkpointing": ["Block"],
    }


def test_stock_classes_that_say_more_than_their_name(
    migrated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    offload = {"class_path": "torch.distributed.fsdp.CPUOffload", "init_args": {"offload_params": True}}
    assert migrated(trainer("FSDPStrategy", {"cpu_offload": offload}))["trainer"]["strategy"] == "shard_fsdp_offload"
    alone = trainer("SingleDeviceStrategy")
    del alone["trainer"]["devices"]
    assert migrated(alone)["trainer"]["devices"] == 1
    assert migrated(trainer("DeepSpeedStrategy", {"zero_optimization": False}))["trainer"]["strategy"] == "shard_ddp"
    capsys.readouterr()
    migrated(trainer("ModelParallelStrategy", {"tensor_parallel_size": 1}, precision="bf16-mixed"))
    assert "autocast is not used" in capsys.readouterr().out


def test_stock_deepspeed_class(
    migrated: Callable[..., dict[str, Any]], refused: Callable[..., str], noted: Callable[..., str]
) -> None:
    path = "lightning.pytorch.strategies.DeepSpeedStrategy"
    result = migrated(trainer(path, {"offload_optimizer": True, "partition_activations": False, "single_submit": True}))
    assert arguments(result) == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "config": {"aio": {"single_submit": True}},
    }
    assert "deepspeed.checkpointing.configure" in noted(trainer(path, {"cpu_checkpointing": True}))
    message = refused(trainer(path, {"config": {"zero_optimization": {"stage": 1}}, "stage": 3, "stagee": 1}))
    assert "given with config, so Lightning does not read them" in message
    assert "stagee is no key of DeepSpeedStrategy: the nearest is 'stage'" in message
    assert "the loss scale is dynamic" in refused(trainer(path, {"loss_scale": 64.0})).lower()


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("lightning.pytorch.strategies.DeepSpeedStrategy", {"hysteresis": "two"}, "'two', but must be a whole number"),
        ("lightning.pytorch.strategies.DeepSpeedStrategy", {"min_loss_scale": "x"}, "'x', but must be a number"),
        ("lightning.pytorch.strategies.DeepSpeedStrategy", {"config": 5}, "5, but must be the path of"),
        ("lightning_shard.ShardDeepSpeedStrategy", {"config": True}, "True, but must be the path of"),
    ],
)
def test_values_of_another_kind_are_named(
    kind: str, given: dict[str, Any], expected: str, refused: Callable[..., str]
) -> None:
    assert f"{next(iter(given))} is {expected}" in refused(trainer(kind, given))


def test_a_stock_precision_plugin_is_the_precision(
    migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    def given(**more: Any) -> dict[str, Any]:
        arguments = {"precision": "16-mixed", "device": "cuda", **more}
        mixed = {"class_path": "lightning.pytorch.plugins.MixedPrecision", "init_args": arguments}
        return trainer("ddp", plugins=[mixed, "my.Plugin"])

    result = migrated(given())["trainer"]
    assert (result["precision"], result["plugins"]) == ("16-mixed", ["my.Plugin"])
    assert "the loss scale is this package's own" in refused(given(scaler="torch.amp.GradScaler")).lower()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (trainer(7), "'7', but must be the name or the class of a strategy"),
        ({"trainer": "ddp"}, "trainer is 'ddp', but must be a mapping of keys"),
        (trainer({"init_args": {}}), "has no class_path"),
        (trainer("DeepSpeedStrategy", {"stage": 5}), "stage is '5', but must be one of 0, 1, 2, 3"),
        (trainer("FSDPStrategy", {"auto_wrap_policy": "my.policy"}), "a function, which YAML can't carry over"),
        (trainer("FSDPStrategy", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2]}), "must be two numbers"),
        (
            trainer("FSDPStrategy", {f"activation_checkpointing{end}": "A" for end in ("", "_policy")}),
            "activation_checkpointing and its policy are both given",
        ),
        (trainer("lightning_shard.ShardFSDPStrategy", {"reshard_after_forward": "on"}), "'on', but must be true"),
    ],
    ids=["a number", "no mapping", "no class", "a stage", "a function", "a mesh", "two policies", "a word"],
)
def test_what_can_not_be_read_is_refused(given: dict[str, Any], expected: str, refused: Callable[..., str]) -> None:
    assert expected in refused(given)


def test_ddp_options_of_32_true_alone(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    path = "pytorch_lightning.strategies.DDPStrategy"
    content = trainer(path, {"static_graph": True, "broadcast_buffers": False})
    assert arguments(migrated(content)) == {"static_graph": True, "broadcast_buffers": False}
    content["trainer"]["precision"] = "bf16-mixed"
    assert refused(content).count("for 32-true") == 2


def test_stock_mistakes_in_one_message(refused: Callable[..., str]) -> None:
    content = trainer(
        "lightning.pytorch.strategies.FSDPStrategy",
        {"sharding_strategy": "FULL", "cpu_ofload": True, "timeout": "soon", "device_mesh": [2, 1]},
        max_epohs=3,
        precision="bf17",
    )
    message = refused({**content, "trianer": {}})
    expected = ["trianer", "max_epohs", "'FULL'", "cpu_ofload", "'soon'", "bf17", "6 things are wrong"]
    assert all(part in message for part in expected), message
    assert "goes with sharding_strategy HYBRID_SHARD" in refused(trainer("FSDPStrategy", {"device_mesh": [2, 1]}))
    assert "the nearest is 'shard_fsdp'" in refused(trainer("shard_fspd"))
    assert "which is not known here" in refused(trainer("my.OwnStrategy"))
    assert "precision: 64" in refused(trainer("ddp", precision=64))


def test_callbacks_that_are_added_and_classes_of_a_policy(migrated: Callable[..., dict[str, Any]]) -> None:
    policy = {
        "class_path": "torch.distributed.fsdp.wrap.ModuleWrapPolicy",
        "init_args": {"module_classes": [{"class_path": "tests.models.Block"}]},
    }
    given = {"auto_wrap_policy": policy}
    added = {"callbacks+": ["lightning.pytorch.callbacks.TQDMProgressBar"]}
    result = migrated(trainer("lightning.pytorch.strategies.FSDPStrategy", given, **added))
    assert arguments(result)["units"] == ["Block"]
    assert "callbacks" not in result["trainer"]
    assert result["trainer"]["callbacks+"] == added["callbacks+"]
