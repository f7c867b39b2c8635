"""From one engine of this package to another: what each setting becomes, and what is named as lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from lightning_shard import registry
from lightning_shard.migrate import (
    accelerate,
    counterparts,
    deepspeed_json,
    dependent_settings,
    fsdp_config,
    lightning_strategies,
    lightning_yaml,
    neutral,
    training_arguments,
)
from lightning_shard.migrate.neutral import Field
from tests.groups import sampled
from tests.migrate.support import arguments, fsdp, trainer, with_notes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# Between the engines of this package


EVERYTHING = {
    "aligned": True,
    "cpu_offload": True,
    "units": ["Block"],
    "activation_checkpointing": "units",
    "forward_prefetch": 2,
    "reshard_after_forward": 2,
    "mesh": {"replicate": 1, "shard": "auto"},
    "timeout_seconds": 60.0,
    "preemption": {"requeue": "never"},
}


def test_from_fsdp_to_deepspeed(migrated: Callable[..., dict[str, Any]], noted: Callable[..., str]) -> None:
    content = trainer("lightning_shard.ShardFSDPStrategy", EVERYTHING, precision="bf16-mixed")
    message = noted(content, "--to", "shard_deepspeed_stage_3")
    assert message.count("\n") == 1
    assert re.search(r"units +\[Block\] .*memory alone: ", message)
    assert re.search(r"forward_prefetch +2 .*speed alone: ", message)
    result = migrated(content, "--to", "shard_deepspeed_stage_3")
    assert arguments(result) == {
        "stage": 3,
        "aligned": True,
        "offload_optimizer": {"device": "cpu"},
        "offload_parameters": {"device": "cpu"},
        "activation_checkpointing": ["Block"],
        "zero_plus_plus": {"hpz_partition_size": 2},
        "timeout_seconds": 60.0,
        "preemption": {"requeue": "never"},
    }
    assert result["trainer"]["precision"] == "bf16-mixed"
    # Nothing is gathered in stage 2, and parameters stay on the device.
    assert "stage 2 keeps full parameters on the device" in noted(content, "--to", "shard_deepspeed_stage_2")


def test_from_deepspeed_to_fsdp(migrated: Callable[..., dict[str, Any]], noted: Callable[..., str]) -> None:
    own = "lightning_shard.ShardDeepSpeedStrategy"
    arguments_given = {
        "stage": 3,
        "offload_optimizer": {},
        "offload_parameters": {"device": "cpu"},
        "zero_plus_plus": {"hpz_partition_size": 2},
        "activation_checkpointing": 2,
        "communication_data_type": "bf16",
    }
    content = trainer(own, arguments_given, precision="bf16-mixed", num_nodes=2)
    result = migrated(content, "--to", "shard_fsdp")
    assert arguments(result) == {
        "reshard_after_forward": 2,
        "cpu_offload": True,
        "activation_checkpointing": 2,
    }
    [plugin] = result["trainer"]["plugins"]
    assert plugin["init_args"] == {"precision": "bf16-mixed", "reduce": "bf16"}
    half = trainer(own, {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert "together, or nothing" in noted(half, "--to", "shard_fsdp")
    assert migrated(half, "--to", "shard_fsdp_offload")["trainer"]["strategy"] == "shard_fsdp_offload"


def test_hybrid_is_never_lost_unseen(migrated: Callable[..., dict[str, Any]], noted: Callable[..., str]) -> None:
    content = trainer("shard_fsdp_hybrid_aligned")
    for name in ("shard_deepspeed_stage_3", "shard_deepspeed_stage_1"):
        assert "speed alone: DeepSpeed shards over all processes: 0.19 removed MiCS" in noted(content, "--to", name)
    # What the name leaves open is the source's.
    assert migrated(content, "--to", "shard_fsdp")["trainer"]["strategy"] == "shard_fsdp_hybrid_aligned"


def test_accumulation_that_rounds_otherwise_is_named(
    capsys: pytest.CaptureFixture[str], migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    content = trainer("shard_deepspeed_stage_1", accumulate_grad_batches=4)
    migrated(content, "--to", "shard_fsdp")
    assert "reduced after each micro-batch, and were once at the boundary" in capsys.readouterr().out
    migrated(content, "--to", "shard_ddp")
    assert "other fp32 roundings" not in capsys.readouterr().out
    for field in ("gradient_accumulation_steps", "trainer.accumulate_grad_batches"):
        # Accelerate's `no_sync` is FSDP's too; stock Lightning's is DDP's alone.
        files = [{**fsdp(), field: 4}] if "." not in field else [trainer("fsdp", accumulate_grad_batches=4)]
        migrated(*files)
        told = "reduced after each micro-batch, and were once at the boundary" in capsys.readouterr().out
        assert told is ("." not in field)
    content = trainer("lightning_shard.ShardDDPStrategy", {"accumulate_sync": "boundary"}, accumulate_grad_batches=4)
    assert arguments(migrated(content, "--to", "shard_fsdp")) == {"accumulate_sync": "boundary"}
    assert arguments(migrated(content, "--to", "shard_deepspeed_stage_1")) == {"stage": 1}
    assert "Stage 2 reduces accumulated gradients by micro_batch" in refused(content, "--to", "shard_deepspeed_stage_2")


NAMES = list(registry.PRESETS)


@pytest.mark.parametrize("name", sampled(NAMES, *range(0, len(NAMES), 4)))
def test_a_name_is_itself(name: str, migrated: Callable[..., dict[str, Any]]) -> None:
    assert migrated(trainer(name))["trainer"]["strategy"] == name
    assert migrated(trainer("shard_ddp"), "--to", name)["trainer"]["strategy"] == name


def test_every_argument_of_every_strategy_is_known() -> None:
    import inspect

    import lightning_shard

    for kind, engine in lightning_yaml.OWN_ENGINES.items():
        signature = set(inspect.signature(getattr(lightning_shard, kind)).parameters)
        assert signature == {name.partition(".")[0] for name in lightning_yaml.arguments_of(engine)}


def test_every_deepspeed_field_is_known() -> None:
    from lightning_shard.engines.zero.config.zero_settings import KEYS

    assert set(KEYS) <= set(lightning_yaml.arguments_of("deepspeed"))


def test_every_setting_of_the_tables_has_an_answer() -> None:
    modules = (accelerate, deepspeed_json, fsdp_config, lightning_strategies, lightning_yaml, training_arguments)
    values = [value for module in modules for value in vars(module).values() if isinstance(value, Mapping)]
    values += [fields for _, fields in lightning_strategies.STRATEGIES.values()]
    described = [field for table in values for field in table.values() if isinstance(field, Field)]
    assert len(described) > 200
    known = {*counterparts.TABLE, *dependent_settings.SPECIAL, ""}
    named = {field.name for field in described if not field.name.startswith(("config.", "trainer."))}
    assert named - known == set()


def test_every_row_of_the_tables_says_what_readers_know() -> None:
    files = Path(neutral.__file__).parent.glob("*.yaml")
    tables = [table for file in files for table in yaml.safe_load(file.read_text()).values()]
    rows = [row for table in tables for row in table.values() if isinstance(row, dict)]
    rows += [row[engine] for row in rows for engine in counterparts.CLASSES if engine in row]
    assert len(rows) > 150
    assert {row.get("kind", "any") for row in rows} <= neutral.KINDS.keys()
    assert {row.get("effect", "numbers") for row in rows} <= {*get_args(neutral.Effect)}
    names = [name for table in tables for keys in table for name in keys.split()]
    assert len(names) == sum(len({name for keys in table for name in keys.split()}) for table in tables)


def test_what_runs_forward_goes_to_every_engine_but_compiling_to_stage_3(
    migrated: Callable[..., dict[str, Any]], noted: Callable[..., str]
) -> None:
    asked = {"compile": True, "activation_checkpointing": "selective"}
    content = trainer("lightning_shard.ShardFSDPStrategy", asked)
    assert arguments(migrated(content, "--to", "shard_ddp")) == asked
    assert arguments(migrated(content, "--to", "shard_deepspeed_stage_2")) == {"stage": 2, **asked}
    message = noted(content, "--to", "shard_deepspeed_stage_3")
    assert message.count("\n") == 0
    assert re.search(r"compile +true .*speed alone: stage 3 gathers inside of the blocks", message)


OWN = "lightning_shard.Shard{}Strategy"
_HPZ = trainer(OWN.format("DeepSpeed"), {"stage": 3, "zero_plus_plus": {"hpz_partition_size": 2}}, num_nodes=2)
_BF16 = {"communication_data_type": "bf16", "zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("content", "to", "says"),
    [
        (trainer("shard_fsdp_hybrid"), "shard_ddp", "strategy +full copies +.*as --to says"),
        (_HPZ, "shard_fsdp_grad_op", "strategy.reshard_after_forward +false +.*as --to says"),
        (trainer("shard_fsdp_offload"), "shard_ddp", "memory alone: DDP keeps everything on the device"),
        (trainer(OWN.format("FSDP"), {"cpu_offload": False}), "shard_ddp", "asking for nothing: .*cpu_offload false"),
        (
            fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_activation_checkpointing=True),
            "shard_deepspeed_stage_2",
            "strategy.activation_checkpointing +units +every repeated block, as there are no units",
        ),
        ({**_BF16, "communication_data_type": "fp32"}, "shard_fsdp", "gradients are reduced in fp32"),
        (_BF16, "shard_fsdp", "none +it goes with a precision, and the source names none; nearest: ShardPrecision"),
        (trainer(OWN.format("DeepSpeed"), {"offload_optimizer": {}}), None, "strategy.stage +2 +the default is 2"),
    ],
)
def test_what_depends_on_the_target_is_said(
    content: dict[str, Any], to: str | None, says: str, migrated: Callable[..., dict[str, Any]], capsys: Any
) -> None:
    migrated(content, "--lossy", *(() if to is None else ("--to", to)))
    assert re.search(says, with_notes(capsys.readouterr().out))
