"""DeepSpeed's files: the Trainer's values and the strategy's, mistakes and removed features."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shard import registry
from lightning_shard.commands import migrate as migrate_command
from lightning_shard.migrate import deepspeed_json
from lightning_shard.migrate.migration import migrate
from tests.harness import ROOT
from tests.migrate import published
from tests.migrate.support import FILES, arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


DEEPSPEED = [
    *sorted((ROOT / "tests/engines/zero/config/files").glob("*.json")),
    *sorted((FILES / "deepspeed").glob("*.json")),
]


# DeepSpeed


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_every_deepspeed_file(path: Path, migrated: Callable[..., dict[str, Any]]) -> None:
    stage = json.loads(path.read_text())["zero_optimization"]
    stage = int(stage["stage"]) if isinstance(stage, dict) else 0
    result = migrated(path, *([] if stage else ["--lossy"]))
    assert arguments(result)["stage"] == stage if stage else result["trainer"]["strategy"] == "shard_ddp"
    for name in [name for name in registry.PRESETS if not name.endswith("_aligned")]:
        if "stage_0" not in name and not (stage < 3 and "nvme" in name):
            strategy = migrated(path, "--to", name, "--lossy")["trainer"]["strategy"]
            kind = strategy if isinstance(strategy, str) else strategy["class_path"]
            assert name.split("_")[1] in kind.lower()


def test_deepspeed_values_of_the_trainer(migrated: Callable[..., dict[str, Any]]) -> None:
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
    assert section["plugins"] == [
        {
            "class_path": "lightning_shard.ShardPrecision",
            "init_args": {
                "precision": "16-mixed",
                "loss_scale": {"initial": 4096.0, "growth_interval": 1000, "hysteresis": 1, "minimum": 1.0},
            },
        }
    ]
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


def test_deepspeed_mistakes_and_removed_features(refused: Callable[..., str]) -> None:
    message = refused({"zero_optimization": {"stage": 2, "overlap_com": True}, "bf16": {"enabled": "maybe"}})
    assert "zero_optimization.overlap_com is no key of DeepSpeed's: the nearest is 'overlap_comm'" in message
    assert "bf16.enabled is 'maybe', but DeepSpeed's rule is: Input should be a valid boolean" in message
    both = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "both true" in refused(both)
    removed = {
        "zero_optimization": {"stage": 3, "mics_shard_size": 4, "offload_optimizer": {"device": "cpu", "ratio": "0.5"}},
        "fp16": {"enabled": True, "loss_scale": 128.0, "consecutive_hysteresis": True},
        "curriculum_learning": {"enabled": True},
        "dataloader_drop_last": True,
    }
    message = refused(removed)
    assert "6 fields have no counterpart" in message
    assert "Nearest: shard_fsdp_hybrid" in message


def test_only_what_differs_from_a_default_is_noted(noted: Callable[..., str]) -> None:
    defaults = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "buffer_count": "auto"}}
    message = noted({"zero_optimization": {**defaults, **both, "reduce_bucket_size": 7}}, "--to", "shard_fsdp")
    assert message.count("\n") == 0
    assert re.search(r"zero_optimization.reduce_bucket_size +7 ", message)


def deepspeed(folder: Path, content: dict[str, Any]) -> Path:
    """A DeepSpeed file that may lack ``zero_optimization``."""
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_that_says_nothing_of_zero_is_stage_0_and_clips_as_deepspeed_does(
    tmp_path: Path, migrated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = migrated(deepspeed(tmp_path, {"train_micro_batch_size_per_gpu": 4}))
    assert result["trainer"]["strategy"] == "shard_ddp"
    assert result["trainer"]["gradient_clip_val"] == deepspeed_json.library_defaults()["gradient_clipping"] == 1.0
    half = migrated(deepspeed(tmp_path, {"bf16": {"enabled": True}, "gradient_clipping": 0}))
    assert half["trainer"]["strategy"] == "shard_ddp"
    assert "gradient_clip_val" not in half["trainer"]
    assert "ZeRO's stage 0 shards nothing, which is the DDP engine" in capsys.readouterr().out
    # What reads the file itself fills these in.
    own = trainer("lightning_shard.ShardDeepSpeedStrategy", {"config": {"train_micro_batch_size_per_gpu": 4}})
    assert arguments(migrated(own))["stage"] == 2
    assert "gradient_clip_val" not in migrated(own)["trainer"]


@pytest.mark.parametrize(
    "key", ["allgather_partitions", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce",
            "load_from_fp32_weights", "memory_efficient_linear"],
)  # fmt: skip
def test_false_is_kept_where_deepspeeds_default_is_true(key: str, migrated: Callable[..., dict[str, Any]]) -> None:
    content = migrated({"zero_optimization": {"stage": 2, key: False}})
    assert arguments(content)["config"] == {"zero_optimization": {key: False}}
    assert "config" not in arguments(migrated({"zero_optimization": {"stage": 2, key: True}}))


@pytest.mark.parametrize("key", ["prescale_gradients", "gradient_predivide_factor"])
def test_where_a_mean_is_divided_is_kept_where_deepspeed_can(key: str, migrated: Callable[..., dict[str, Any]]) -> None:
    value: Any = True if key.startswith("prescale") else 8.0
    content = {"zero_optimization": {"stage": 1}, key: value}
    assert arguments(migrated(content))["config"] == {key: value}
    for name in ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2", "shard_deepspeed_stage_3"):
        assert migrated(content, "--to", name)["trainer"]["strategy"] == name
    unscattered = {"zero_optimization": {"stage": 2, "reduce_scatter": False}, key: value}
    assert arguments(migrated(unscattered))["config"] == {key: value}


def test_inputs_are_cast_on_every_engine(migrated: Callable[..., dict[str, Any]]) -> None:
    content = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "auto_cast": True}}
    for name in ("shard_fsdp", "shard_deepspeed_stage_1"):
        assert migrated(content, "--to", name)["trainer"] == {
            "strategy": name, "precision": "16-mixed", "gradient_clip_val": 1.0
        }  # fmt: skip


def test_what_deepspeed_does_not_read_is_noted(migrated: Callable[..., dict[str, Any]], refused: Any) -> None:
    content = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    assert migrated({**content, "cuda_visible_devices": 0}) == migrated(content)
    assert "the nearest is 'steps_per_print'" in refused({**content, "steps_per_prints": 5})
    # DeepSpeed had this section before its own compiler.


def test_that_no_step_is_skipped_in_bf16_is_said(migrated: Any, refused: Any, capsys: Any) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    migrated(content)
    assert "in bf16 a step with inf or NaN is taken, which DeepSpeed skips (nonfinite: skip)" in capsys.readouterr().out
    content["bf16"]["check_grad_overflow"] = True
    assert arguments(migrated(content))["config"] == {"bf16": {"check_grad_overflow": True}}
    assert "bf16.check_grad_overflow: true. Only DeepSpeed has it" in refused(content, "--to", "shard_fsdp")


def test_a_removed_optimizer_is_lost(refused: Callable[..., str], migrated: Callable[..., dict[str, Any]]) -> None:
    content = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3}}}
    assert "DeepSpeed has removed the optimizers with compressed communication" in refused(content)
    assert migrated(content, "--lossy")["trainer"]["strategy"] == "shard_ddp"


def test_an_optimizer_of_deepspeeds_is_torchs_elsewhere(migrated: Callable[..., dict[str, Any]]) -> None:
    plain = {"lr": 2e-5, "bias_correction": True, "torch_adam": True}
    content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": plain}}
    assert migrated(content, "--to", "shard_fsdp")["optimizer"] == {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    }
    assert arguments(migrated(content))["config"]["optimizer"] == content["optimizer"]


@pytest.mark.parametrize("name", [None, "shard_ddp", "shard_fsdp", "shard_fsdp_offload", "shard_deepspeed_stage_2"])
def test_files_of_the_published_kinds_need_no_lossy(name: str | None, tmp_path: Path) -> None:
    lost = {}
    for kind, content in published.files().items():
        _, target = migrate([deepspeed(tmp_path, content)], migrate_command.known_names(), name)
        lost[kind] = [item.field for item in target.reading.lost]
    assert len(lost) >= 60
    # With DeepSpeed its own schedule stays in its configuration.
    with_deepspeed = name is None or "deepspeed" in name
    assert {kind for kind in lost if lost[kind]} == (set() if with_deepspeed else {"warmup_in_numbers"})


def _batches(whole: int, micro: int, steps: int | None = None) -> dict[str, Any]:
    own = {} if steps is None else {"gradient_accumulation_steps": steps}
    keys = {"train_batch_size": whole, "train_micro_batch_size_per_gpu": micro, **own}
    return {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **keys}


@pytest.mark.parametrize("name", ["shard_fsdp", "shard_deepspeed_stage_2"])
def test_accumulation_follows_from_the_batch_sizes(
    name: str, migrated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    two = {"trainer": {"accelerator": "cpu", "devices": 2}}
    assert migrated(_batches(64, 4), two, "--to", name)["trainer"]["accumulate_grad_batches"] == 8
    assert migrated(_batches(8, 4), two, "--to", name)["trainer"]["accumulate_grad_batches"] == 1
    assert migrated(_batches(64, 4, 8), two, "--to", name)["trainer"]["accumulate_grad_batches"] == 8
    capsys.readouterr()
    # Without the processes it is said, and not guessed.
    assert "accumulate_grad_batches" not in migrated(_batches(64, 4), "--to", name)["trainer"]
    assert (
        "set trainer.accumulate_grad_batches to it over train_micro_batch_size_per_gpu 4 x n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("given", "devices", "says"),
    [
        (_batches(65, 4), None, "65, but must be a multiple of train_micro_batch_size_per_gpu 4 x n processes"),
        (_batches(65, 4), 2, "65, but must be a multiple of train_micro_batch_size_per_gpu 4 x 2 processes"),
        (
            _batches(64, 4, 4),
            2,
            "must be equal to train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 4 x 2",
        ),
    ],
)
def test_batch_sizes_that_can_not_be(
    given: dict[str, Any], devices: int | None, says: str, refused: Callable[..., str]
) -> None:
    files = [given] if devices is None else [given, {"trainer": {"accelerator": "cpu", "devices": devices}}]
    assert f"train_batch_size is {given['train_batch_size']}, but" in refused(*files)
    assert says in refused(*files)
