"""A DeepSpeed file meets the run: values that contradict it, and those that "auto" takes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.engines.zero.config.building import BUCKET, OVERLAPPED
from lightning_shard.engines.zero.config.fields import (
    DeepSpeedFields,
    ZeroBuckets,
)
from tests.engines.zero.config.support import ADAMW, ZERO, configured, contradiction, run_facts, settings_of


def test_every_contradiction_is_in_one_error() -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": 0.2}},
    }
    facts = run_facts(world_size=2, optimizer={**ADAMW, "type": "AdamW"})
    text = contradiction(config, facts)
    starts = (
        "train_micro_batch_size_per_gpu is 8, but the dataloader's batch size is 2",
        "gradient_accumulation_steps is 4, but the Trainer's accumulate_grad_batches is 1",
        "train_batch_size is 64, but the run's, 2 per process x 1 accumulated x 2 processes, is 4",
        "gradient_clipping is 1.0, but the Trainer's clipping is 0.0",
        "fp16.enabled is True, but with the Trainer's precision, compute bf16",
        "optimizer.type is 'SGD', but configure_optimizers returns AdamW",
        "optimizer.params.lr is 0.5, but the optimizer's is 0.001",
        "optimizer.params.weight_decay is 0.01, but the optimizer's is 0.05",
        "scheduler.params.total_num_steps is 10, but the Trainer's number of optimizer steps is 500",
        "scheduler.params.warmup_max_lr is 0.2, but the optimizer's learning rate is 0.001",
    )
    assert [line[: len(start)] for line, start in zip(text.split("\n  - ")[1:], starts, strict=True)] == [*starts]


@pytest.mark.parametrize(
    ("config", "facts", "text"),
    [
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            {"optimizer": None},
            "lr is 'auto', but no learning",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            {"total_steps": None},
            "total_num_steps is 'auto', but the Trainer's number of optimizer steps is not known: write a number",
        ),
    ],
)
def test_auto_values_that_nobody_knows(config: dict[str, Any], facts: dict[str, Any], text: str) -> None:
    assert text in contradiction(config, run_facts(**facts))


def test_hyperparameters_are_text_or_fall_back_to_each_other() -> None:
    params = {"lr": "2.5e-1", "betas": ["0.9", "0.95"], "eps": "auto", "adam_w_mode": "False"}
    schedule = {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    config = {
        "optimizer": {"type": "Adam", "params": params},
        "scheduler": {"type": "WarmupLR", "params": schedule},
    }
    result = configured(DeepSpeedFields(config=config), run_facts(optimizer=None))
    # An unknown value is the optimizer's own default. DeepSpeed takes no warm-up of 0 steps.
    assert result["optimizer"]["params"] == {"lr": 0.25, "betas": [0.9, 0.95], "adam_w_mode": False}
    assert result["scheduler"]["params"] == {"warmup_max_lr": 0.25, "warmup_num_steps": 1, "warmup_type": "linear"}


@pytest.mark.parametrize(
    ("precision", "aligned", "given", "expected"),
    [
        ("bf16-mixed", False, {}, {}),
        ("bf16-mixed", True, {}, {"torch_adam": True}),
        ("bf16-mixed", True, {"bias_correction": False}, {"bias_correction": False}),
        ("bf16-true", False, {}, {"fp32_optimizer_states": False}),
        ("bf16-true", True, {}, {"torch_adam": True}),
    ],
)
def test_which_adam_deepspeed_builds(
    precision: str, aligned: bool, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.5, **given}}}
    result = configured(DeepSpeedFields(config=config), run_facts(precision, aligned=aligned, optimizer=None))
    assert result["optimizer"]["params"] == {"lr": 0.5, **expected}


@pytest.mark.parametrize(
    ("stage", "precision", "device", "given", "expected"),
    [
        (1, "32-true", "cuda", None, True),
        (1, "bf16-mixed", "cuda", None, False),  # DeepSpeed's optimizer there reduces after backward
        (2, "bf16-mixed", "cuda", None, True),
        (2, "bf16-mixed", "cuda", False, False),
        (2, "bf16-mixed", "cpu", None, None),
        (3, "bf16-mixed", "cuda", None, None),
    ],
)
def test_stages_1_and_2_overlap_on_devices(
    stage: int, precision: str, device: str, given: bool | None, expected: bool | None
) -> None:
    fields = DeepSpeedFields(stage=stage, buckets=ZeroBuckets(overlap_comm=given))
    zero = configured(fields, run_facts(precision, device_type=device, number_of_parameters=10**12))[ZERO]
    assert zero.get("overlap_comm") is expected
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == (BUCKET if stage == 3 else OVERLAPPED)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("aligned", [False, True])
def test_a_dumped_configuration_can_be_given_again(stage: Any, aligned: bool, tmp_path: Path) -> None:
    facts = run_facts(aligned=aligned)
    config = configured(DeepSpeedFields(stage=stage), facts)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config, sort_keys=True))
    again = DeepSpeedFields(config=str(path))
    settings_of(again, aligned=aligned)
    assert configured(again, facts) == config
