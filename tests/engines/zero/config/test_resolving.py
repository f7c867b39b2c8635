"""A DeepSpeed file meets the run: values that contradict it, and those that "auto" takes from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as library
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.engines.zero.config.building import BUCKET, NVME_BUFFER, OVERLAPPED
from lightning_shard.engines.zero.config.fields import (
    DeepSpeedFields,
    OptimizerOffload,
    ParameterOffload,
    ZeroBuckets,
)
from tests.engines.zero.config.support import ADAMW, FILES, ZERO, configured, contradiction, run_facts, settings_of


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
    lines = text.split("\n  - ")[1:]
    for start, line in zip(
        (
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
        ),
        lines,
        strict=True,
    ):
        assert line.startswith(start)


def test_values_that_agree_with_the_run_pass() -> None:
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
    }
    facts = run_facts(
        world_size=2, accumulate_grad_batches=3, gradient_clip_val=1.0, optimizer={**ADAMW, "type": "DeepSpeedCPUAdam"}
    )
    assert configured(DeepSpeedFields(config=config), facts)["train_batch_size"] == 12


@pytest.mark.parametrize(
    ("clip", "value", "algorithm", "text"),
    [
        (0, 0.5, "norm", "gradient_clipping is 0.0, but the Trainer's clipping is 0.5"),
        (0.5, 0.5, "value", "gradient_clipping is by norm, but the Trainer's gradient_clip_algorithm is 'value'"),
        ("auto", 0.5, "value", None),
        (0.0, None, "norm", None),
        (0.5, 0.5, "norm", None),
    ],
)
def test_clipping_is_the_trainers(clip: Any, value: float | None, algorithm: str, text: str | None) -> None:
    facts = run_facts(gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    if text is None:
        fields = DeepSpeedFields(config={"gradient_clipping": clip})
        assert configured(fields, facts)["gradient_clipping"] == 0.0
    else:
        assert text in contradiction({"gradient_clipping": clip}, facts)


@given(
    micro=st.none() | st.integers(1, 64),
    accumulate=st.integers(1, 16),
    world=st.integers(1, 64),
    given_micro=st.none() | st.integers(1, 64),
)
def test_the_batch_keys_always_multiply(
    micro: int | None, accumulate: int, world: int, given_micro: int | None
) -> None:
    config = {"train_micro_batch_size_per_gpu": given_micro, "train_batch_size": "auto"}
    fields = DeepSpeedFields(config=config)
    facts = run_facts(micro_batch_size=micro, accumulate_grad_batches=accumulate, world_size=world)
    if None not in (micro, given_micro) and micro != given_micro:
        assert f"is {given_micro}, but the dataloader's batch size is {micro}" in contradiction(config, facts)
        return
    result = configured(fields, facts)
    assert result["train_micro_batch_size_per_gpu"] == (micro or given_micro or 1)
    assert result["gradient_accumulation_steps"] == accumulate
    assert result["train_batch_size"] == result["train_micro_batch_size_per_gpu"] * accumulate * world


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


def test_hyperparameters_may_be_text() -> None:
    params = {"lr": "1e-4", "betas": ["0.9", "0.95"], "adam_w_mode": "False"}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "1e2", "warmup_type": "linear"}}
    config = {"optimizer": {"type": "Adam", "params": params}, "scheduler": schedule}
    result = configured(DeepSpeedFields(config=config), run_facts(optimizer=None))
    assert result["optimizer"]["params"] == {"lr": 1e-4, "betas": [0.9, 0.95], "adam_w_mode": False}
    assert result["scheduler"]["params"] == {"warmup_num_steps": 100, "warmup_type": "linear"}
    assert type(result["scheduler"]["params"]["warmup_num_steps"]) is int


def test_hyperparameters_fall_back_to_each_other() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    result = configured(DeepSpeedFields(config=config), run_facts(optimizer=None))
    # What no one knows is the optimizer's own default.
    assert result["optimizer"]["params"] == {"lr": 0.25}
    assert result["scheduler"]["params"] == {"warmup_max_lr": 0.25, "warmup_num_steps": 1}


@pytest.mark.parametrize(
    ("precision", "aligned", "given", "expected"),
    [
        ("bf16-mixed", False, {}, {}),
        ("bf16-mixed", True, {}, {"torch_adam": True}),
        ("bf16-mixed", True, {"bias_correction": True}, {"torch_adam": True}),
        ("bf16-mixed", True, {"bias_correction": False}, {"bias_correction": False}),
        ("bf16-mixed", True, {"torch_adam": False}, {"torch_adam": False}),
        ("bf16-true", False, {}, {"fp32_optimizer_states": False}),
        ("bf16-true", False, {"torch_adam": True}, {"torch_adam": True}),
        ("bf16-true", True, {}, {"torch_adam": True}),
    ],
)
def test_which_adam_deepspeed_builds(
    precision: str, aligned: bool, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.5, **given}}}
    result = configured(DeepSpeedFields(config=config), run_facts(precision, aligned=aligned, optimizer=None))
    assert result["optimizer"]["params"] == {"lr": 0.5, **expected}


def test_buffers_are_no_larger_than_the_model() -> None:
    nvme = ParameterOffload(device="nvme", nvme_path="/x")
    fields = DeepSpeedFields(stage=3, offload_parameters=nvme)
    zero = configured(fields, run_facts())[ZERO]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == zero["offload_param"]["buffer_size"] == 10_000
    zero = configured(fields, run_facts(number_of_parameters=10**12))[ZERO]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == BUCKET
    assert zero["offload_param"]["buffer_size"] == NVME_BUFFER
    own = library.DeepSpeedConfig({"train_batch_size": 1, ZERO: {"offload_param": {"device": "cpu"}}}).zero_config
    assert own.reduce_bucket_size == own.allgather_bucket_size == BUCKET
    assert own.offload_param.buffer_size == NVME_BUFFER


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


def test_pinned_memory_is_left_out_on_a_cpu() -> None:
    fields = DeepSpeedFields(stage=3, offload_optimizer=OptimizerOffload(), offload_parameters=ParameterOffload())
    for device, expected in (("cpu", False), ("cuda", None)):
        zero = configured(fields, run_facts(device_type=device))[ZERO]
        assert zero["offload_optimizer"].get("pin_memory") is zero["offload_param"].get("pin_memory") is expected


def test_the_result_is_the_same_in_every_call_and_any_order() -> None:
    content = json.loads((FILES / "zero3_offload.json").read_text())
    texts = set()
    for order in itertools.islice(itertools.permutations(content), 20):
        config = {key: content[key] for key in order}
        texts.add(json.dumps(configured(DeepSpeedFields(config=config), run_facts())))
    assert len(texts) == 1


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


def test_deepspeeds_throughput_timer_runs_where_it_is_asked_for() -> None:
    from deepspeed.utils.config import get_timers_config

    def enabled(config: dict[str, Any]) -> bool:
        return bool(get_timers_config(configured(DeepSpeedFields(config=config), run_facts())).enabled)

    assert not enabled({ZERO: {"stage": 2}})
    assert enabled({ZERO: {"stage": 2}, "timers": {"throughput": {"enabled": True}}})
