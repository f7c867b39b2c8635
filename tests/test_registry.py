"""The table of strategy names, Lightning's registry and the equal YAML."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_shard import (
    ConfigurationError,
    ShardDDPStrategy,
    ShardDeepSpeedStrategy,
    ShardFSDPStrategy,
    registry,
)
from lightning_shard.commands import plan_inputs
from lightning_shard.commands.strategies import preset_yaml
from lightning_shard.engines.memory_model import EngineFacts, plain_settings
from tests.harness import ROOT

PAGES = ("README.md", "examples/guides/strategies.md")
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "nvme_offload"}
PLAIN: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "shard_ddp": (ShardDDPStrategy, {}),
    "shard_fsdp": (ShardFSDPStrategy, {}),
    "shard_fsdp_grad_op": (ShardFSDPStrategy, {"reshard_after_forward": False}),
    "shard_fsdp_hybrid": (ShardFSDPStrategy, {"mesh": {"replicate": "auto", "shard": "auto"}}),
    "shard_fsdp_offload": (ShardFSDPStrategy, {"cpu_offload": True}),
    "shard_deepspeed_stage_0": (
        ShardDDPStrategy,
        {"accumulate_sync": "boundary", "find_unused_parameters": True},
    ),
    "shard_deepspeed_stage_1": (ShardDeepSpeedStrategy, {"stage": 1}),
    "shard_deepspeed_stage_2": (ShardDeepSpeedStrategy, {"stage": 2}),
    "shard_deepspeed_stage_2_offload": (ShardDeepSpeedStrategy, {"stage": 2, "offload_optimizer": CPU}),
    "shard_deepspeed_stage_3": (ShardDeepSpeedStrategy, {"stage": 3}),
    "shard_deepspeed_stage_3_offload": (
        ShardDeepSpeedStrategy,
        {"stage": 3, "offload_optimizer": CPU, "offload_parameters": CPU},
    ),
    "shard_deepspeed_stage_3_offload_nvme": (
        ShardDeepSpeedStrategy,
        {"stage": 3, "offload_optimizer": NVME, "offload_parameters": NVME},
    ),
}
ALL = PLAIN | {f"{name}_aligned": (kind, {**args, "aligned": True}) for name, (kind, args) in PLAIN.items()}


def _settings(strategy: Any) -> dict[str, Any]:
    """What the constructor was given, as ranks and checkpoints compare it."""
    common = plain_settings(strategy._settings)
    return {**common, **strategy.engine_for().resolved_config(), "class": type(strategy)}


def test_a_name_is_a_class_and_arguments() -> None:
    assert set(registry.PRESETS) == set(ALL)
    for name, (kind, arguments) in ALL.items():
        assert registry.PRESETS[name].init_args == arguments
        strategy = StrategyRegistry.get(name)
        assert type(strategy) is kind
        assert strategy.aligned is name.endswith("_aligned")
        assert StrategyRegistry.get(name) is not strategy
        trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        assert type(trainer.strategy) is kind


# Lightning calls it by the older name too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["shard_fsdp_hybrid_aligned", "shard_deepspeed_stage_3_offload"])
def test_the_equal_yaml_builds_an_equal_strategy(name: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.strategy", type=str | Strategy)
    config = parser.parse_string(preset_yaml(name))
    from_yaml = parser.instantiate(config).trainer.strategy
    assert _settings(from_yaml) == _settings(registry.build(name))


def test_settings_differ_between_names() -> None:
    # Guards the test above: settings that are always equal would prove nothing.
    settings = [_settings(registry.build(name)) for name in ALL]
    for number, one in enumerate(settings):
        assert one not in settings[:number]


def test_names_that_are_advised_are_registered() -> None:
    advised = {name for facts in get_args(EngineFacts) for name in facts.advised}
    assert {*advised, *plan_inputs.NEAREST.values()} <= set(PLAIN)


def test_every_name_has_a_line_in_the_tables_for_readers() -> None:
    rows = {page: re.findall(r"^\| `(shard_\w+)`", (ROOT / page).read_text(), re.MULTILINE) for page in PAGES}
    assert set(rows["examples/guides/strategies.md"]) == set(PLAIN)
    assert {name for name in PLAIN if "deepspeed" not in name} <= set(rows["README.md"])


@pytest.mark.parametrize(
    ("module", "table", "said"),
    [
        ("pytorch_lightning.strategies", "StrategyRegistry", "pytorch_lightning's; import lightning_shard.pytorch"),
        ("lightning.fabric.strategies", "STRATEGY_REGISTRY", "Fabric; use the Trainer"),
    ],
)
def test_a_name_says_why_it_is_of_no_use_elsewhere(module: str, table: str, said: str) -> None:
    strategies = getattr(pytest.importorskip(module), table)
    registry.register()  # as an import of this package after that one does
    for name in PLAIN:
        with pytest.raises(ConfigurationError, match=f"^{name} is a strategy of lightning.pytorch's Trainer.*{said}"):
            strategies.get(name)
