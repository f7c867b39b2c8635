"""DeepSpeed's files: the Trainer's values and the strategy's, mistakes and removed features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shard import registry
from lightning_shard.commands import migrate as migrate_command
from lightning_shard.migrate.migration import migrate
from tests.groups import sampled
from tests.harness import ROOT
from tests.migrate import published
from tests.migrate.support import FILES, arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Migrated = Callable[..., dict[str, Any]]
Told = Callable[..., str]
DEEPSPEED = [
    *sorted((ROOT / "tests/engines/zero/config/files").glob("*.json")),
    *sorted((FILES / "deepspeed").glob("*.json")),
]
NAMES = [name for name in registry.PRESETS if not name.endswith("_aligned") and "stage_0" not in name]


@pytest.mark.parametrize("path", sampled(DEEPSPEED, 0, 1, 3), ids=lambda path: path.stem)
def test_every_deepspeed_file(path: Path, migrated: Migrated) -> None:
    stage = json.loads(path.read_text())["zero_optimization"]
    stage = int(stage["stage"]) if isinstance(stage, dict) else 0
    result = migrated(path, *([] if stage else ["--lossy"]))
    assert arguments(result)["stage"] == stage if stage else result["trainer"]["strategy"] == "shard_ddp"
    for name in [name for name in NAMES if stage == 3 or "nvme" not in name][::2]:
        strategy = migrated(path, "--to", name, "--lossy")["trainer"]["strategy"]
        kind = strategy if isinstance(strategy, str) else strategy["class_path"]
        assert name.split("_")[1] in kind.lower()


def test_values_of_the_trainer(migrated: Migrated) -> None:
    content = {
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 1000},
        "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 3,
        "communication_data_type": "FP16",
        "train_micro_batch_size_per_gpu": 4,
        "aio": {"thread_count": 2},
    }
    result = migrated(content)
    section = result["trainer"]
    assert (section["gradient_clip_val"], section["accumulate_grad_batches"]) == (0.5, 3)
    scale = {"initial": 4096.0, "growth_interval": 1000, "hysteresis": 1, "minimum": 1.0}
    precision = {"precision": "16-mixed", "loss_scale": scale}
    assert section["plugins"] == [{"class_path": "lightning_shard.ShardPrecision", "init_args": precision}]
    assert section["precision"] is None  # so that it may lie over a YAML with another
    assert arguments(result) == {
        "stage": 3,
        "zero_plus_plus": {"hpz_partition_size": 2},
        "communication_data_type": "fp16",
        "stage3": {"prefetch_bucket_size": 1000},
        "config": {"train_micro_batch_size_per_gpu": 4, "aio": {"intra_op_parallelism": 2}},
    }
    for_fsdp = migrated({**content, "zero_optimization": {"stage": 3}}, "--to", "shard_fsdp", "--lossy")
    assert for_fsdp["trainer"]["plugins"][0]["init_args"]["reduce"] == "fp16"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"zero_optimization": {"stage": 2, "overlap_com": True}},
            "zero_optimization.overlap_com is no key of DeepSpeed's: the nearest is 'overlap_comm'",
        ),
        ({"bf16": {"enabled": "maybe"}}, "bf16.enabled is 'maybe', but DeepSpeed's rule is: Input should be a valid"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both true"),
        ({"fp16": {"enabled": True, "loss_scale": 128.0}}, "on every engine here the loss scale is dynamic"),
        ({"dataloader_drop_last": True}, "the Trainer has its own dataloader"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning: {enabled: true} (DeepSpeed removed it"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "use shard_fsdp_hybrid"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3}}}, "optimizer.type is 'OneBitLamb'"),
    ],
)
def test_mistakes_and_removed_features(content: dict[str, Any], says: str, refused: Told) -> None:
    assert says in refused({"zero_optimization": {"stage": 1}, **content})


def test_a_file_that_says_nothing_of_zero_is_stage_0_and_clips_as_deepspeed_does(
    tmp_path: Path, migrated: Migrated, table: Told
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4}))
    assert "ZeRO's stage 0 shards nothing, which is the DDP engine" in table(path)
    section = migrated(path)["trainer"]
    assert section["strategy"] == "shard_ddp"
    assert section["gradient_clip_val"] == DeepSpeedConfig({"train_batch_size": 1}).gradient_clipping
    path.write_text(json.dumps({"bf16": {"enabled": True}, "gradient_clipping": 0}))
    assert "gradient_clip_val" not in migrated(path)["trainer"]
    # The strategy that reads the file has other defaults.
    own = trainer("lightning_shard.ShardDeepSpeedStrategy", {"config": {"train_micro_batch_size_per_gpu": 4}})
    assert arguments(migrated(own))["stage"] == 2
    assert "gradient_clip_val" not in migrated(own)["trainer"]


def test_further_keys_stay_in_config(migrated: Migrated, refused: Told, table: Told) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 2, "allgather_partitions": False}}
    assert arguments(migrated(content))["config"] == content | {"zero_optimization": {"allgather_partitions": False}}
    content = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "check_grad_overflow": True}}
    assert "in bf16 a step with inf or NaN is taken, which DeepSpeed skips" in table(content)
    assert arguments(migrated(content))["config"] == {"bf16": {"check_grad_overflow": True}}
    assert "ShardFSDPStrategy has no such argument" in refused(content, "--to", "shard_fsdp")
    # The mean is the same.
    content = {"zero_optimization": {"stage": 1}, "prescale_gradients": True}
    assert arguments(migrated(content))["config"] == {"prescale_gradients": True}
    assert migrated(content, "--to", "shard_fsdp")["trainer"]["strategy"] == "shard_fsdp"


def test_an_optimizer_of_deepspeeds_is_torchs_elsewhere(migrated: Migrated) -> None:
    given = {"lr": 2e-5, "bias_correction": True, "torch_adam": True}
    content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": given}}
    assert migrated(content, "--to", "shard_fsdp")["optimizer"] == {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    }
    assert arguments(migrated(content))["config"]["optimizer"] == content["optimizer"]


@pytest.mark.parametrize("name", sampled([None, "shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2"], 0, 2))
def test_files_of_the_published_kinds_need_no_lossy(name: str | None, tmp_path: Path) -> None:
    lost, known, path = {}, migrate_command.known_names(), tmp_path / "ds.json"
    for kind, content in published.files().items():
        path.write_text(json.dumps(content))
        _, target = migrate([path], known, name)
        lost[kind] = [item.field for item in target.reading.lost]
    assert len(lost) >= 60
    # With DeepSpeed its own schedule stays in its configuration.
    with_deepspeed = name is None or "deepspeed" in name
    assert {kind for kind in lost if lost[kind]} == (set() if with_deepspeed else {"warmup_in_numbers"})


def _batches(whole: int, micro: int, steps: int | None = None) -> dict[str, Any]:
    own = {} if steps is None else {"gradient_accumulation_steps": steps}
    keys = {"train_batch_size": whole, "train_micro_batch_size_per_gpu": micro, **own}
    return {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **keys}


TWO = {"trainer": {"accelerator": "cpu", "devices": 2}}


def test_accumulation_follows_from_the_batch_sizes(migrated: Migrated, table: Told) -> None:
    to = ("--to", "shard_fsdp")
    assert migrated(_batches(64, 4), TWO, *to)["trainer"]["accumulate_grad_batches"] == 8
    assert migrated(_batches(64, 4, 8), TWO)["trainer"]["accumulate_grad_batches"] == 8
    # Without the processes it is said, and not guessed.
    assert "accumulate_grad_batches" not in migrated(_batches(64, 4), *to)["trainer"]
    assert "set trainer.accumulate_grad_batches to it over train_micro_batch_size" in table(_batches(64, 4))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([_batches(65, 4), TWO], "65, but must be a multiple of train_micro_batch_size_per_gpu 4 x 2 processes"),
        (
            [_batches(64, 4, 4), TWO],
            "must be equal to train_micro_batch_size_per_gpu 4 x gradient_acc",
        ),
    ],
)
def test_impossible_batch_sizes(given: list[dict[str, Any]], says: str, refused: Told) -> None:
    assert says in refused(*given)
