"""``TrainingArguments`` of Hugging Face's Trainer: sharding, precision and batches, by whichever engine they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.tools import migrate
from tests.migrate.support import BASE, arguments

Files = Callable[..., dict[str, Any]]
COMMON = {"output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def test_fsdp(migrated: Files) -> None:
    config = {"transformer_layer_cls_to_wrap": ["Block"], "limit_all_gathers": True, "xla": False}
    fields = {"bf16": True, "fsdp": "hybrid_shard auto_wrap offload", "fsdp_config": config, "max_grad_norm": 0.5}
    result = migrated({**COMMON, **fields})
    expected = {"units": ["Block"], "cpu_offload": True, "mesh": {"replicate": "auto", "shard": "auto"}}
    assert arguments(result) == expected
    section = result["trainer"]
    assert (section["precision"], section["accumulate_grad_batches"]) == ("bf16-mixed", 2)
    assert section["gradient_clip_val"] == 0.5
    second = {"fsdp": ["shard_grad_op"], "fsdp_config": {"version": 2, "reshard_after_forward": False}}
    mesh = {"dp_replicate_size": 2, "dp_shard_size": 4}
    result = arguments(migrated({**COMMON, **second, "parallelism_config": mesh}))
    assert (result["reshard_after_forward"], result["mesh"]) == (False, {"replicate": 2, "shard": 4})


def test_deepspeed(migrated: Files, refused: Callable[..., str]) -> None:
    auto = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    auto["gradient_accumulation_steps"] = "auto"
    result = migrated({**COMMON, "bf16": True, "deepspeed": auto})
    assert arguments(result)["stage"] == 3
    section = result["trainer"]
    given = section["precision"], section["accumulate_grad_batches"], section["gradient_clip_val"]
    assert given == ("bf16-mixed", 2, 1.0)  # 1.0 is the Trainer's default
    other = {**auto, "gradient_accumulation_steps": 8}
    message = refused({**COMMON, "deepspeed": other})
    assert "gradient_accumulation_steps is 8, but gradient_accumulation_steps is 2" in message


def test_axolotl(migrated: Files, refused: Callable[..., str]) -> None:
    axolotl = {"base_model": "a/b", "micro_batch_size": 2, "gradient_accumulation_steps": 4, "optimizer": "adamw_torch"}
    fsdp = migrated({**axolotl, "bf16": "auto", "fsdp_version": 2, "fsdp_config": {"offload_params": True}})
    assert arguments(fsdp)["cpu_offload"] is True
    assert (fsdp["trainer"]["precision"], fsdp["trainer"]["accumulate_grad_batches"]) == ("bf16-mixed", 4)
    assert "tensor_parallel_size: 2 (the mesh has no such axis" in refused({**axolotl, "tensor_parallel_size": 2})
    assert migrated({**axolotl, "tensor_parallel_size": 1})["trainer"]["precision"] == "32-true"
    offloaded = migrated({**axolotl, "fsdp_version": 2, "gradient_checkpointing": "offload"})
    assert arguments(offloaded)["activation_checkpointing"] == "offload"


def test_how_long_it_trains_and_nothing_that_is_not_taken_is_cut(migrated: Files, tmp_path: Path) -> None:
    section = migrated({**COMMON, "num_train_epochs": 3.0, "max_steps": -1, "logging_steps": 5})["trainer"]
    assert (section["max_epochs"], section.get("max_steps"), section["log_every_n_steps"]) == (3, None, 5)
    section = migrated({**COMMON, "num_train_epochs": 3, "max_steps": 70})["trainer"]
    assert (section.get("max_epochs"), section["max_steps"]) == (None, 70)
    others = ["packing", "use_peft", "eval_strategy", "model_name_or_path", "dataset_text_field", "report_to"]
    path = tmp_path / "args.json"
    path.write_text(json.dumps({**COMMON, "bf16": True, "learning_rate": 1e-4, **dict.fromkeys(others, True)}))
    table = migrate(path).table.splitlines()
    told = ", ".join(sorted([*others, "output_dir"]))
    assert table[-1] == f"not of sharding, precision or steps, see Lightning's Trainer: {told}"


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({"bf16": "yes"}, "bf16-mixed"),
        ({"pure_bf16": True}, "bf16-true"),  # LLaMA-Factory's
        ({"bfloat16": True}, "bf16-true"),  # axolotl's, as the next ones
        ({"float16": True}, "16-true"),
        ({"bf16": False, "fp16": True}, "16-mixed"),
    ],
)
def test_other_words_for_sixteen_bits(fields: dict[str, Any], precision: str, migrated: Files) -> None:
    assert migrated({**COMMON, "bf16": False, **fields})["trainer"]["precision"] == precision


def test_all_that_a_trainer_saves(migrated: Files) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # TrainingArguments ask it for the device
    saved = transformers.TrainingArguments(output_dir="out", use_cpu=True, gradient_accumulation_steps=3).to_dict()
    result = migrated(BASE, saved)
    assert result["trainer"]["strategy"] == "shard_ddp"
    assert result["trainer"]["precision"] == "32-true"
    assert result["trainer"]["accumulate_grad_batches"] == 3
    assert result["model"]["class_path"] == "examples.gpt.GPT"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 2}}}, "fsdp and deepspeed are both given"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"fp8": True}, "fp8: true (float8 is another precision here; nearest: ShardPrecision('fp8-mixed')"),
        ({"gradient_accumulation_steps": 0}, "accumulate_grad_batches: got 0; allowed: 1 or more"),
        ({"bf16": "maybe"}, "bf16 is 'maybe', but must be one of true, false"),
        ({"gradient_acumulation_steps": 2}, "the nearest is 'gradient_accumulation_steps'"),
        ({"fsdp": "ful_shard"}, "fsdp has 'ful_shard', but its words are full_shard"),
    ],
)
def test_mistakes(fields: dict[str, Any], says: str, refused: Callable[..., str]) -> None:
    assert says in refused({**COMMON, **fields})
