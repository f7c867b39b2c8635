"""From one engine of this package to another: each setting's counterpart, and the lost ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from lightning_shard import registry
from tests.groups import sampled
from tests.migrate.support import arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Migrated = Callable[..., dict[str, Any]]
Told = Callable[..., str]
OWN = "lightning_shard.Shard{}Strategy"


def test_from_fsdp_to_deepspeed(migrated: Migrated, table: Told) -> None:
    given = {
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
    content = trainer(OWN.format("FSDP"), given, precision="bf16-mixed")
    lines = table(content, "--to", "shard_deepspeed_stage_3")
    assert re.search(r"units +\[Block\] .*memory alone: .*--to shard_fsdp", lines)
    assert re.search(r"forward_prefetch +2 .*speed alone: ", lines)
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
    # Stage 2 keeps parameters on the device.
    assert "stage 2 can't offload it to cpu" in table(content, "--to", "shard_deepspeed_stage_2")


def test_from_deepspeed_to_fsdp(migrated: Migrated, table: Told) -> None:
    given = {
        "stage": 3,
        "offload_optimizer": {},
        "offload_parameters": {"device": "cpu"},
        "zero_plus_plus": {"hpz_partition_size": 2},
        "activation_checkpointing": 2,
        "communication_data_type": "bf16",
    }
    content = trainer(OWN.format("DeepSpeed"), given, precision="bf16-mixed", num_nodes=2)
    result = migrated(content, "--to", "shard_fsdp")
    assert arguments(result) == {"reshard_after_forward": 2, "cpu_offload": True, "activation_checkpointing": 2}
    [plugin] = result["trainer"]["plugins"]
    assert plugin["init_args"] == {"precision": "bf16-mixed", "reduce": "bf16"}
    half = trainer(OWN.format("DeepSpeed"), {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert "FSDP offloads parameters, gradients and optimizer state together" in table(half, "--to", "shard_fsdp")
    assert migrated(half, "--to", "shard_fsdp_offload")["trainer"]["strategy"] == "shard_fsdp_offload"


def test_accumulation_that_rounds_otherwise_is_named(table: Told, migrated: Migrated, refused: Told) -> None:
    note = "by micro-batch or at the boundary"
    assert note in table(trainer("shard_deepspeed_stage_1", accumulate_grad_batches=4), "--to", "shard_fsdp")
    content = trainer(OWN.format("DDP"), {"accumulate_sync": "boundary"}, accumulate_grad_batches=4)
    assert arguments(migrated(content, "--to", "shard_fsdp")) == {"accumulate_sync": "boundary"}
    stage_1 = arguments(migrated(content, "--to", "shard_deepspeed_stage_1"))
    assert stage_1 == {"stage": 1, "accumulate_sync": "boundary"}
    assert "stage 2 reduces accumulated gradients by micro_batch" in refused(content, "--to", "shard_deepspeed_stage_2")


NAMES = list(registry.PRESETS)


@pytest.mark.parametrize("name", sampled(NAMES, *range(0, len(NAMES), 8)))
def test_a_name_is_itself(name: str, migrated: Migrated) -> None:
    assert migrated(trainer(name))["trainer"]["strategy"] == name
    assert migrated(trainer("shard_ddp"), "--to", name)["trainer"]["strategy"] == name


_HPZ = trainer(OWN.format("DeepSpeed"), {"stage": 3, "zero_plus_plus": {"hpz_partition_size": 2}}, num_nodes=2)
_BF16 = {"communication_data_type": "bf16", "zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}
_COMPILED = trainer(OWN.format("FSDP"), {"compile": True})


@pytest.mark.parametrize(
    ("content", "to", "says"),
    [
        (trainer("shard_fsdp_hybrid"), "shard_ddp", "strategy +full copies +.*as --to says"),
        (_HPZ, "shard_fsdp_grad_op", "strategy.reshard_after_forward +false +.*as --to says"),
        (trainer(OWN.format("DDP"), {"broadcast_buffers": False}), "shard_fsdp", "broadcast_buffers +false +-> +none"),
        (trainer(OWN.format("FSDP"), {"cpu_offload": False}), "shard_ddp", "asking for nothing: .*cpu_offload false"),
        (_COMPILED, "shard_deepspeed_stage_3", "compile +true .*speed alone: stage 3 gathers inside of the blocks"),
        ({**_BF16, "communication_data_type": "fp32"}, "shard_fsdp", "gradients are reduced in fp32"),
        (_BF16, "shard_fsdp", "none +it goes with a precision, and the source names none; nearest: ShardPrecision"),
    ],
)
def test_notes_by_target(content: dict[str, Any], to: str, says: str, table: Told) -> None:
    assert re.search(says, table(content, "--lossy", "--to", to))
