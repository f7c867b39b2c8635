"""DeepSpeed's configuration: files as people have them, typed fields, contradictions, and what DeepSpeed takes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepspeed.runtime import config as library
from docstring_parser import parse_from_object
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lightning_shard import ShardDeepSpeedStrategy
from lightning_shard.engines.zero.config import (
    DeepSpeedFields,
    Effective,
    OptimizerOffload,
    ParameterOffload,
    RunFacts,
    Stage3Options,
    ZeroBuckets,
    ZeroPlusPlus,
    check_fields,
    check_policy,
    deepspeed_config,
    dump_config,
    effective,
    hyperparameters,
    keys,
    loss_scaling_from,
    merging,
    reading,
)
from lightning_shard.engines.zero.config.building import BUCKET, NVME_BUFFER
from lightning_shard.engines.zero.config.checks import CONTRACT
from lightning_shard.errors import ConfigurationError, PrecisionError
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.policy import PRECISIONS, policy_from, short
from lightning_shard.registry import build

FILES = Path(__file__).parent / "deepspeed_files"
ZERO = "zero_optimization"
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.05}


def _facts(precision: str = "bf16-mixed", *, aligned: bool = False, **others: Any) -> RunFacts:
    facts = RunFacts(
        world_size=1,
        device_type="cpu",
        policy=policy_from(precision, aligned=aligned),
        aligned=aligned,
        micro_batch_size=2,
        optimizer=ADAMW,
        total_steps=500,
        warmup_steps=50,
        hidden_size=64,
        number_of_parameters=10_000,
    )
    return replace(facts, **others)


def _accepted(config: dict[str, Any]) -> library.DeepSpeedConfig:
    """What DeepSpeed makes of it, in one process without a group: it raises on anything it does not take."""
    return library.DeepSpeedConfig(json.loads(dump_config(config)))


def _refusal(config: Mapping[str, Any] | str, *, aligned: bool = False, **typed: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_fields(DeepSpeedFields(config=config, **typed), aligned)
    return str(caught.value)


def _contradiction(config: Mapping[str, Any], facts: RunFacts) -> str:
    with pytest.raises(ConfigurationError) as caught:
        deepspeed_config(DeepSpeedFields(config=dict(config)), facts)
    return str(caught.value)


# ---- files as people have them


def test_a_zero_2_file_with_auto_values() -> None:
    fields = DeepSpeedFields(config=str(FILES / "zero2_fp16_auto.json"))
    check_fields(fields, aligned=True)
    assert loss_scaling_from(fields.config) == LossScaling(initial=65536, growth_interval=1000, hysteresis=2)
    facts = _facts("16-mixed", world_size=4, accumulate_grad_batches=3, gradient_clip_val=1.0)
    config = deepspeed_config(fields, facts)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (24, 2)
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (3, 0.0)
    assert config["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.05}
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 50,
        "total_num_steps": 500,
    }
    assert config["fp16"] == {"enabled": True, "loss_scale": 1.0, "fp16_master_weights_and_grads": False}
    assert "bf16" not in config
    # What a file says outright stays, larger than the model or not.
    assert config[ZERO]["reduce_bucket_size"] == config[ZERO]["allgather_bucket_size"] == 200_000_000
    assert "auto" not in dump_config(config)


def test_a_zero_3_file_with_offload() -> None:
    fields = DeepSpeedFields(stage=3, config=str(FILES / "zero3_offload.json"))
    check_fields(fields, aligned=True)
    zero = deepspeed_config(fields, _facts())[ZERO]
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    # Hugging Face's formulas for a hidden size of 64.
    assert zero["reduce_bucket_size"] == 4096
    assert zero["stage3_prefetch_bucket_size"] == 3686
    assert zero["stage3_param_persistence_threshold"] == 640
    assert zero["sub_group_size"] == 1_000_000_000
    assert type(zero["sub_group_size"]) is int


def test_an_nvme_file_with_old_names() -> None:
    fields = DeepSpeedFields(config=str(FILES / "zero3_nvme.json"))
    check_fields(fields, aligned=False)
    asked = effective(fields)
    assert (asked.stage, asked.optimizer_device, asked.parameter_device) == (3, "nvme", "nvme")
    config = deepspeed_config(fields, _facts())
    assert config["aio"]["intra_op_parallelism"] == 1
    assert "thread_count" not in config["aio"]
    assert config[ZERO]["stage3_gather_16bit_weights_on_model_save"] is True
    assert "stage3_gather_fp16_weights_on_model_save" not in config[ZERO]


def test_a_file_whose_values_are_strings() -> None:
    fields = DeepSpeedFields(config=str(FILES / "zero1_strings.json"))
    check_fields(fields, aligned=True)
    facts = _facts(world_size=2, micro_batch_size=4, accumulate_grad_batches=2, gradient_clip_val=1.0, optimizer=None)
    config = deepspeed_config(fields, facts)
    assert config["bf16"]["enabled"] is True
    assert config["optimizer"] == {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "torch_adam": True}}
    assert config[ZERO]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert (config[ZERO]["stage"], config[ZERO]["reduce_bucket_size"]) == (1, 500_000_000)
    assert config[ZERO]["overlap_comm"] is False
    assert config["activation_checkpointing"]["partition_activations"] is False
    assert config["flops_profiler"]["enabled"] is False
    # Infinity, for never, is nothing that JSON has; a section of a removed feature that is off asks for nothing.
    assert not {"steps_per_print", "amp", "bfloat16", "cpu_offload"} & {*config, *config[ZERO]}
    # Sections of DeepSpeed's own logging pass as they are.
    assert config["wandb"] == {"enabled": False, "project": "my_project"}
    assert config["comms_logger"] == {"enabled": False, "verbose": False, "prof_all": True}
    assert config["tensorboard"]["job_name"] == "train_bert"


def test_a_file_of_stage_0() -> None:
    fields = DeepSpeedFields(config=str(FILES / "zero0_plain.json"))
    check_fields(fields, aligned=True)
    facts = _facts(
        "32-true", aligned=True, world_size=2, micro_batch_size=None, gradient_clip_val=0.5, optimizer={"lr": 0.1}
    )
    config = deepspeed_config(fields, facts)
    assert config[ZERO]["stage"] == 0
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert "elasticity" not in config
    assert config["scheduler"] == {"type": "CosineAnnealingLR", "params": {"T_max": 100}}


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("*.json")))
def test_deepspeed_takes_every_file(name: str) -> None:
    content = json.loads((FILES / name).read_text())
    given = {k: v for k, v in content.items() if "batch" not in k and "gradient" not in k and k != "optimizer"}
    before = json.dumps(given)
    fields = DeepSpeedFields(config=given)
    precision = "32-true" if name == "zero0_plain.json" else "bf16-mixed"
    taken = _accepted(deepspeed_config(fields, _facts(precision)))
    assert taken.train_batch_size == 2
    assert taken.zero_optimization_stage == int(name[4])
    assert json.dumps(given) == before


# ---- values and keys


@given(st.integers(min_value=0, max_value=2**60))
def test_whole_numbers_are_understood_as_text_and_as_floats(number: int) -> None:
    problems: list[str] = []
    forms: list[Any] = [number, str(number), f" {number}"]
    if number < 2**53:
        forms += [float(number), str(float(number)), repr(float(number)).replace("e", "E")]
    assert all(reading.understood(form, "int", "key", problems) == number for form in forms)
    assert all(type(reading.understood(form, "int", "key", problems)) is int for form in forms)
    assert problems == []


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_understood_as_text(number: float) -> None:
    problems: list[str] = []
    assert reading.understood(repr(number), "float", "key", problems) == number
    assert problems == []


@given(st.text(max_size=6) | st.none() | st.booleans() | st.integers() | st.floats() | st.lists(st.integers()))
def test_what_is_no_flag_is_never_read_as_one(value: Any) -> None:
    problems: list[str] = []
    read = reading.understood(value, "bool", "some.key", problems)
    word = str(value).strip().lower()
    expected = {"true": True, "false": False, "auto": "auto"}.get(word) if isinstance(value, str | bool) else None
    if isinstance(value, int | float) and value in (0, 1):
        expected = bool(value)
    assert read == expected
    assert bool(problems) == (expected is None)
    assert all(problem.startswith("some.key is ") for problem in problems)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes', but must be true or false"),
        ({"fp16": {"enabled": 2}}, "fp16.enabled is 2, but must be true or false"),
        ({"fp16": {"hysteresis": 1.5}}, "fp16.hysteresis is 1.5, but must be a whole number"),
        ({ZERO: {"reduce_bucket_size": True}}, f"{ZERO}.reduce_bucket_size is True, but must be a number"),
        ({ZERO: {"reduce_bucket_size": "5e-1"}}, f"{ZERO}.reduce_bucket_size is '5e-1', but must be a whole number"),
        ({ZERO: {"reduce_bucket_size": "big"}}, f"{ZERO}.reduce_bucket_size is 'big', but must be a number"),
        ({ZERO: {"reduce_bucket_size": 0}}, f"{ZERO}.reduce_bucket_size is 0, but DeepSpeed's rule is: Input should"),
        ({ZERO: {"stage": 4}}, f"{ZERO}.stage is 4, but DeepSpeed's rule is: Input should be"),
        ({ZERO: {"stage": "two"}}, f"{ZERO}.stage is 'two', but must be a number"),
        ({ZERO: 2}, f"{ZERO} is 2, but must be a mapping of keys"),
        ({ZERO: {"stage": 3, "compute_grad_norm": False}}, "compute_grad_norm=false is supported only with ZeRO Stage"),
        (
            {ZERO: {"offload_optimizer": {"device": "gpu"}}},
            f"{ZERO}.offload_optimizer.device is 'gpu', but DeepSpeed's",
        ),
        ({ZERO: {"offload_optimizer": "cpu"}}, f"{ZERO}.offload_optimizer is 'cpu', but must be a mapping of keys"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1, but must be 0 or more"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan, but must be a number"),
        ({"train_batch_size": "0"}, "train_batch_size is 0, but must be 1 or more"),
        ({"communication_data_type": "int8"}, "communication_data_type is 'int8', but must be one of fp32, bf16, fp16"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype is 'fp8', but must be one of fp32"),
        ({"optimizer": {"params": {}}}, "optimizer.type is None, but must name one"),
        ({"scheduler": {"type": "auto"}}, "scheduler.type is 'auto', but must name one"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type is 'AdamV', which neither DeepSpeed nor torch has"),
        (
            {"scheduler": {"type": "WarmupDecay"}},
            "which neither DeepSpeed nor torch has: the nearest is 'WarmupDecayLR'",
        ),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params is [], but must be a mapping"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "params.lr is 'fast', but must be a number"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}},
            "params.betas is 0.9, but must be 'auto' or a list",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}},
            "clipping is the Trainer's: set gradient_cl",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is None, but this type needs it: write a value"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto"}}},
            "cycle_min_lr is 'auto', but this type",
        ),
        (
            {"scheduler": {"type": "StepLR", "params": {"gamma": 0.5}}},
            "params.step_size is None, but this type needs it",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, "but must be 'log' or 'linear'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "is 0, but must be 1 or more"),
        ({1: 2}, "1 is no key of DeepSpeed's"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bf16 is given twice, as {'enabled': True} and"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is false, but the strategy sets it"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last is true, but the Trainer has its own dataloader"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is true, but DeepCompile needs"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast is true, but floating inputs are cast"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal is true, but checkpoints are this"),
    ],
)
def test_values_that_can_not_be_used(config: dict[str, Any], text: str) -> None:
    assert text in _refusal(config)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is no key of DeepSpeed's: the nearest is 'zero_optimization'"),
        ({"fp16": {"enabeld": True}}, "fp16.enabeld is no key of DeepSpeed's: the nearest is 'enabled'"),
        ({ZERO: {"max_live_params": 1}}, "max_live_params is no key of DeepSpeed's: the nearest is 'stage3_max_live_p"),
        (
            {ZERO: {"offload_param": {"devise": "cpu"}}},
            f"{ZERO}.offload_param.devise is no key of DeepSpeed's: the near",
        ),
        (
            {ZERO: {"zenflow": {"topk": 1}}},
            f"{ZERO}.zenflow.topk is no key of DeepSpeed's: the nearest is 'topk_ratio'",
        ),
        ({"aio": {"blocks": 1}}, "aio.blocks is no key of DeepSpeed's: the nearest is 'block_size'"),
        ({"checkpoint": {"writer": {"kind": "fast"}}}, "checkpoint.writer.kind is no key of DeepSpeed's: "),
        ({"timers": {"throughput": {"on": True}}}, "timers.throughput.on is no key of DeepSpeed's: known are enabled"),
        ({"activation_checkpointing": {"partitioned_activations": True}}, "the nearest is 'partition_activations'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "the nearest is 'grad_accum_dtype'"),
        ({"comms_logger": {"enable": True}}, "comms_logger.enable is no key of DeepSpeed's: the nearest is 'enabled'"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decy": 0}}}, "the nearest is 'weight_decay'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "the nearest is 'warmup_num_steps'"),
        ({"optimizer": {"type": "SGD", "params": {"momntum": 0.9}}}, "the nearest is 'momentum'"),
    ],
)
def test_unknown_keys_name_the_nearest(config: dict[str, Any], text: str) -> None:
    assert text in _refusal(config)


def test_all_problems_are_in_one_error() -> None:
    text = _refusal({"fp16": {"enabeld": 1}, ZERO: {"stage": 3, "overlap_comm": "maybe"}, "gradient_clip": 1}, stage=2)
    assert text.startswith("The DeepSpeed configuration can't be used, in 4 places:\n  - ")
    for part in ("fp16.enabeld", "overlap_comm is 'maybe'", "gradient_clip is no key", "stage is 2, but config's"):
        assert part in text


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_mics_is_named_as_removed(key: str) -> None:
    text = _refusal({ZERO: {"stage": 3, key: 4}})
    assert f"{ZERO}.{key} is 4, but DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid" in text
    # -1 and false were the values of a file that did not use it.
    check_fields(DeepSpeedFields(config={ZERO: {"mics_shard_size": -1, key: False}}), aligned=True)


@pytest.mark.parametrize("key", [*keys.REMOVED, *keys.FOREIGN])
def test_sections_without_a_place_here_are_refused_unless_they_are_off(key: str) -> None:
    assert f"{key} can't be used: " in _refusal({key: {"enabled": True}})
    for off in (None, False, {}, {"enabled": False}, {"enabled": "false", "other": 1}, {"enabled": "auto"}):
        fields = DeepSpeedFields(config={key: off})
        check_fields(fields, aligned=True)
        assert key not in deepspeed_config(fields, _facts())


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence_parallel_size", 1), ("data_parallel_size", 1), ("tensor_parallel", {"autotp_size": 1})],
)
def test_axes_of_size_1_are_no_axes(key: str, value: Any) -> None:
    check_fields(DeepSpeedFields(config={key: value}), aligned=True)
    larger = {"autotp_size": 2} if isinstance(value, dict) else 2
    assert f"{key} can't be used: " in _refusal({key: larger})


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert f"config is {str(missing)!r}, but there is no such file" in _refusal(str(missing))
    for content, text in (
        ("{fp16: 1}", "which is not JSON: Expecting property name"),
        ("[1]", "which holds a list, but must hold a mapping"),
        ('{"fp16": {}, "fp16": {}}', "config has the key 'fp16' twice. Remove one"),
    ):
        path = tmp_path / "ds.json"
        path.write_text(content)
        assert text in _refusal(str(path))
    assert "config is 3, but must be the path" in _refusal(3)  # type: ignore[arg-type]


# ---- typed fields


TYPED: dict[str, tuple[DeepSpeedFields, Any]] = {
    "stage": (DeepSpeedFields(stage=3), 3),
    "communication_data_type": (DeepSpeedFields(communication_data_type="bf16"), "bf16"),
}
for _group, _cls, _values in (
    (
        "offload_optimizer",
        OptimizerOffload,
        {
            "device": "nvme",
            "nvme_path": "/nvme",
            "pin_memory": False,
            "buffer_count": 6,
            "fast_init": True,
            "ratio": 0.5,
        },
    ),
    (
        "offload_parameters",
        ParameterOffload,
        {
            "device": "nvme",
            "nvme_path": "/nvme",
            "pin_memory": False,
            "buffer_count": 6,
            "buffer_size": 7,
            "max_in_cpu": 8,
        },
    ),
    (
        "buckets",
        ZeroBuckets,
        {
            "reduce": 11,
            "allgather": 12,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "round_robin_gradients": True,
        },
    ),
    (
        "stage3",
        Stage3Options,
        {
            "prefetch_bucket_size": 13,
            "param_persistence_threshold": 14,
            "model_persistence_threshold": 15,
            "max_live_parameters": 16,
            "max_reuse_distance": 17,
            "sub_group_size": 18,
            "module_granularity_threshold": 19,
            "leaf_modules": ["MoE"],
        },
    ),
    (
        "zero_plus_plus",
        ZeroPlusPlus,
        {
            "hpz_partition_size": 2,
            "quantized_weights": True,
            "quantized_nontrainable_weights": True,
            "quantized_gradients": True,
        },
    ),
):
    for _name, _value in _values.items():
        TYPED[f"{_group}.{_name}"] = (DeepSpeedFields(stage=3, **{_group: _cls(**{_name: _value})}), _value)


def test_every_typed_field_has_a_key_and_a_case() -> None:
    names = []
    for field in fields_of(DeepSpeedFields):
        group = {"offload_optimizer": OptimizerOffload, "offload_parameters": ParameterOffload}.get(field.name)
        group = group or getattr(DeepSpeedFields(), field.name)
        inner = fields_of(group) if is_dataclass(group) else ()
        names += [f"{field.name}.{f.name}" for f in inner] or ([] if field.name == "config" else [field.name])
    assert names == [*dict.fromkeys(names)]
    assert set(names) == set(merging.KEYS) == set(TYPED)


@pytest.mark.parametrize("name", sorted(TYPED))
def test_typed_fields_reach_deepspeed(name: str) -> None:
    fields, value = TYPED[name]
    path = merging.KEYS[name]
    config = deepspeed_config(fields, _facts(world_size=2))
    assert merging.get(config, path) == value
    # One process, for DeepSpeed's own check of the batch size; hpZ is checked against the group later.
    config["train_batch_size"] = 2
    taken: Any = _accepted(config)
    if path == "communication_data_type":
        assert taken.communication_data_type is torch.bfloat16
        return
    taken = taken.zero_config
    for key in path.split(".")[1:]:
        taken = getattr(taken, key, None) if hasattr(taken, key) else getattr(taken, key.removeprefix("stage3_"))
    assert (str(taken) if isinstance(taken, Path) else taken) == value


@pytest.mark.parametrize("name", sorted(TYPED))
def test_a_typed_field_and_the_config_must_agree(name: str) -> None:
    fields, value = TYPED[name]
    path = merging.KEYS[name]
    other = {
        bool: lambda v: not v,
        int: lambda v: 2 if name == "stage" else v + 1,
        float: lambda v: v / 2,
        str: lambda v: {"nvme": "cpu", "bf16": "fp16"}.get(v, "/other"),
        list: lambda v: [*v, "Other"],
    }[type(value)](value)
    config: dict[str, Any] = {}
    merging.put(config, path, other)
    text = _refusal(config, **{f.name: getattr(fields, f.name) for f in fields_of(fields) if f.name != "config"})
    assert f"{name} is {value!r}, but config's {path} is {other!r}: remove one of the two" in text
    merging.put(config, path, value)
    assert merging.get(merging.merge(replace(fields, config=config), []), path) == value
    merging.put(config, path, "auto")
    assert merging.get(merging.merge(replace(fields, config=config), []), path) == value


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (
            {"offload_parameters": ParameterOffload()},
            "offload_parameters is 'cpu' with stage 2, but parameters are cut",
        ),
        ({"stage": 0, "offload_optimizer": OptimizerOffload()}, "offload_optimizer is 'cpu' with stage 0, but"),
        (
            {"stage": 2, "offload_optimizer": OptimizerOffload(device="nvme", nvme_path="/x")},
            "offload_optimizer is 'nvme' with stage 2, but NVMe needs stage 3",
        ),
        (
            {"stage": 3, "offload_optimizer": OptimizerOffload(device="nvme")},
            "offload_optimizer is 'nvme' without nvme_path",
        ),
        (
            {"stage": 3, "offload_parameters": ParameterOffload(device="nvme")},
            "offload_parameters is 'nvme' without nvme_path",
        ),
        ({"zero_plus_plus": ZeroPlusPlus(hpz_partition_size=2)}, "zero_hpz_partition_size is 2 with stage 2, but hpZ"),
        ({"zero_plus_plus": ZeroPlusPlus(quantized_weights=True)}, "zero_quantized_weights is true with stage 2"),
        ({"zero_plus_plus": ZeroPlusPlus(quantized_gradients=True)}, "zero_quantized_gradients is true with stage 2"),
        ({"stage": 1, "offload_optimizer": OptimizerOffload(ratio=0.5)}, "offload_optimizer.ratio is 0.5 with stage 1"),
        (
            {"stage": 3, "offload_optimizer": OptimizerOffload(ratio=1.5)},
            "ratio is 1.5, but DeepSpeed's rule is: Input",
        ),
        (
            {"buckets": ZeroBuckets(reduce=-1)},
            f"{ZERO}.reduce_bucket_size is -1, but DeepSpeed's rule is: Input should",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other(typed: dict[str, Any], text: str) -> None:
    assert text in _refusal({}, **typed)


def test_what_the_engine_is_built_by() -> None:
    assert effective(DeepSpeedFields()) == Effective(
        stage=2,
        optimizer_device="none",
        parameter_device="none",
        communication_data_type=None,
        optimizer_type=None,
        scheduler_type=None,
    )
    config = {
        ZERO: {"stage": "3", "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}},
        "communication_data_type": "FP32",
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR"},
    }
    assert effective(DeepSpeedFields(config=config)) == Effective(
        stage=3,
        optimizer_device="none",
        parameter_device="cpu",
        communication_data_type="fp32",
        optimizer_type="AdamW",
        scheduler_type="WarmupLR",
    )


@pytest.mark.parametrize(
    "group", [DeepSpeedFields, OptimizerOffload, ParameterOffload, ZeroBuckets, Stage3Options, ZeroPlusPlus, RunFacts]
)
def test_every_field_has_a_text_for_help(group: type) -> None:
    # jsonargparse's own source of texts.
    texts = {p.arg_name: p.description for p in parse_from_object(group).params}
    assert set(texts) == {field.name for field in fields_of(group)}
    assert all(text and (group is RunFacts or len(text.split()) >= 4) for text in texts.values())


def test_fields_come_from_yaml() -> None:
    class Holder:
        def __init__(self, fields: DeepSpeedFields) -> None:
            self.fields = fields

    parser = ArgumentParser()
    parser.add_class_arguments(Holder, "h")
    text = yaml.safe_dump(
        {
            "h": {
                "fields": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "ratio": 0.5},
                    "buckets": {"reduce": "auto", "allgather": 1000},
                    "stage3": {"leaf_modules": ["MoE"]},
                    "config": {"fp16": {"enabled": "auto"}},
                }
            }
        }
    )
    built = parser.instantiate(parser.parse_string(text)).h.fields
    assert built == DeepSpeedFields(
        stage=3,
        offload_optimizer=OptimizerOffload(device="nvme", nvme_path="/nvme", ratio=0.5),
        buckets=ZeroBuckets(reduce="auto", allgather=1000),
        stage3=Stage3Options(leaf_modules=["MoE"]),
        config={"fp16": {"enabled": "auto"}},
    )


# ---- the contract


@pytest.mark.parametrize("path", sorted(CONTRACT))
def test_settings_that_break_the_contract_are_named(path: str) -> None:
    breaking = {
        "communication_data_type": "bf16",
        "data_types.grad_accum_dtype": "bf16",
        "data_types.buffer_dtype": "bf16",
        f"{ZERO}.zenflow": {"topk_ratio": 0.1},
        "gradient_predivide_factor": 2.0,
        "gradient_allreduce_op": "sum",
    }.get(path, True)
    allowed, rule = CONTRACT[path]
    config: dict[str, Any] = {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    merging.put(config, path, breaking)
    if path == "gradient_allreduce_op":
        # DeepSpeed itself has no sum in stage 3.
        merging.put(config, f"{ZERO}.stage", 2)
    text = _refusal(config, aligned=True)
    assert f"{path} is {breaking!r} under aligned, but the contract is: {rule}." in text
    check_fields(DeepSpeedFields(config=config), aligned=False)
    for value in allowed:
        merging.put(config, path, value)
        check_fields(DeepSpeedFields(config=config), aligned=True)


def test_the_contract_is_pinned_not_left_to_defaults() -> None:
    config = deepspeed_config(DeepSpeedFields(stage=3), _facts(aligned=True))
    assert config[ZERO]["ignore_unused_parameters"] is True
    assert config[ZERO]["memory_efficient_linear"] is False
    assert config[ZERO]["round_robin_gradients"] is False
    assert config["bf16"]["check_grad_overflow"] is False
    assert config["bf16"]["bf16_master_weights_and_grads"] is False
    assert (config["communication_data_type"], config["data_types"]["grad_accum_dtype"]) == ("fp32", "fp32")
    assert config["gradient_predivide_factor"] == 1.0
    # A plain name leaves DeepSpeed its defaults.
    assert "memory_efficient_linear" not in deepspeed_config(DeepSpeedFields(stage=3), _facts())[ZERO]


# ---- precision


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_deepspeed_takes_every_precision(precision: str, stage: Any, offload: bool, aligned: bool) -> None:
    offloaded = OptimizerOffload() if offload and stage else None
    fields = DeepSpeedFields(stage=stage, offload_optimizer=offloaded)
    check_fields(fields, aligned)
    facts = _facts(precision, aligned=aligned)
    policy = facts.policy
    if (stage == 0 and aligned and precision != "32-true") or (
        precision == "16-true" and not aligned and stage and not offload
    ):
        named = "shard_ddp_aligned" if aligned else "shard_deepspeed_stage_2_offload"
        with pytest.raises(PrecisionError, match=named):
            deepspeed_config(fields, facts)
        return
    taken = _accepted(deepspeed_config(fields, facts))
    cast_beforehand = stage == 0 and policy.is_low_memory
    assert taken.float16_config.enabled == (policy.compute == torch.float16 and not cast_beforehand)
    assert taken.bfloat16_config.enabled == (policy.compute == torch.bfloat16 and not cast_beforehand)
    assert taken.communication_data_type == policy.reduce
    if stage:
        assert taken.grad_accum_dtype == short(policy.accumulate)
    else:
        assert taken.grad_accum_dtype is None
    low = policy.is_low_memory and stage > 0
    assert taken.bfloat16_config.bf16_master_weights_and_grads == (low and policy.master == torch.bfloat16)
    assert taken.bfloat16_config.bf16_optimizer_states == (low and policy.master == torch.bfloat16)
    assert taken.float16_config.fp16_master_weights_and_grads == (low and policy.master == torch.float16)
    # Never DeepSpeed's own scale, and never its own clipping, whose default is 1.0.
    assert taken.float16_config.loss_scale == (1.0 if taken.float16_config.enabled else 0)
    assert taken.gradient_clipping == 0.0
    assert taken.zero_allow_untested_optimizer is True
    assert taken.zero_force_ds_cpu_optimizer is False
    explicit = {"zero_force_ds_cpu_optimizer": True, ZERO: {"stage": stage, "ignore_unused_parameters": False}}
    taken = _accepted(deepspeed_config(replace(fields, config=explicit), facts))
    assert taken.zero_force_ds_cpu_optimizer is True
    assert taken.zero_config.ignore_unused_parameters is False


def test_a_precision_is_refused_before_the_run_is_known() -> None:
    with pytest.raises(PrecisionError, match="stage 0 under aligned"):
        check_policy(DeepSpeedFields(stage=0), policy_from("bf16-mixed", aligned=True), aligned=True)
    check_policy(DeepSpeedFields(stage=0), policy_from("32-true", aligned=True), aligned=True)


@pytest.mark.parametrize(
    ("config", "precision", "text"),
    [
        (
            {"fp16": {"enabled": True}},
            "bf16-mixed",
            "fp16.enabled is true, but the Trainer's precision computes in bf16",
        ),
        ({"bf16": {"enabled": False}}, "bf16-mixed", "bf16.enabled is false, but the Trainer's precision computes in"),
        (
            {"bf16": {"enabled": "true"}},
            "32-true",
            "bf16.enabled is true, but the Trainer's precision computes in fp32",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            "bf16-mixed",
            "keeps masters in fp32: 16-bit masters are precision 'bf16-true'",
        ),
        ({"data_types": {"param_dtype": "half"}}, "bf16-mixed", "data_types.param_dtype is 'fp16', but the Trainer's"),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}, ZERO: {"stage": 0}},
            "bf16-mixed",
            "grad_accum_dtype is 'fp32', but stage 0 sums gradients in bf16 only",
        ),
    ],
)
def test_a_precision_that_contradicts_the_trainer(config: dict[str, Any], precision: str, text: str) -> None:
    assert text in _contradiction(config, _facts(precision))


# ---- the loss scale


def test_loss_scales() -> None:
    assert loss_scaling_from(None) is loss_scaling_from({"fp16": {"enabled": "auto"}}) is None
    assert loss_scaling_from({"fp16": {"enabled": False, "loss_scale": 128}}) is None
    given = {"loss_scale": "0", "initial_scale_power": 12, "loss_scale_window": "5e2", "hysteresis": 1}
    assert loss_scaling_from({"fp16": {**given, "min_loss_scale": 2}}) == LossScaling(
        initial=4096, growth_interval=500, hysteresis=1, minimum=2
    )
    # DeepSpeed's own defaults, where a section says something and leaves something out.
    own = library.DeepSpeedConfig({"train_batch_size": 1}).float16_config
    assert loss_scaling_from({"fp16": {"loss_scale": 0}}) == LossScaling(
        initial=own.initial_dynamic_scale(),
        growth_interval=own.loss_scale_window,
        hysteresis=own.hysteresis,
        minimum=own.min_loss_scale,
    )


@pytest.mark.parametrize(
    ("fp16", "text"),
    [
        ({"loss_scale": 128}, "fp16.loss_scale to 0 and fp16.initial_scale_power to 7, to begin at 128"),
        ({"loss_scale": 1}, "fp16.initial_scale_power to 0, to begin at 1"),
        ({"consecutive_hysteresis": True}, "fp16.consecutive_hysteresis is true, but the loss scale's hysteresis"),
        ({"min_loss_scale": 3}, "The fp16 section (min_loss_scale 3) can't be used: loss_scale.minimum is 3.0"),
        ({"initial_scale_power": 200}, "The fp16 section (initial_scale_power 200) can't be used"),
        ({"hysteresis": 0}, "loss_scale.hysteresis is 0, but must be 1 or more"),
    ],
)
def test_loss_scales_without_an_equal(fp16: dict[str, Any], text: str) -> None:
    assert text in _refusal({"fp16": {"enabled": True, **fp16}})
    with pytest.raises(ConfigurationError):
        loss_scaling_from({"fp16": fp16})


# ---- the run


def test_every_contradiction_is_in_one_error() -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": 0.2}},
        ZERO: {"stage": 3, "zero_hpz_partition_size": 3},
    }
    facts = _facts(world_size=2, optimizer={**ADAMW, "type": "AdamW"})
    text = _contradiction(config, facts)
    for line in (
        "train_batch_size is 64, but that of the run, 2 per process x 1 accumulated x 2 processes, is 4",
        "train_micro_batch_size_per_gpu is 8, but the dataloader's batch size is 2",
        "gradient_accumulation_steps is 4, but the Trainer's accumulate_grad_batches is 1",
        "gradient_clipping is 1, but the Trainer's gradient_clip_val is not set: set Trainer(gradient_clip_val=1)",
        "fp16.enabled is true, but the Trainer's precision computes in bf16",
        "optimizer.type is 'SGD', but configure_optimizers returns AdamW",
        "optimizer.params.lr is 0.5, but the optimizer's is 0.001",
        "optimizer.params.weight_decay is 0.01, but the optimizer's is 0.05",
        "scheduler.params.total_num_steps is 10, but the Trainer's number of optimizer steps is 500",
        "scheduler.params.warmup_max_lr is 0.2, but the optimizer's learning rate is 0.001",
        f"{ZERO}.zero_hpz_partition_size is 3, but must divide the 2 processes of the run",
    ):
        assert f"\n  - {line}" in text
    assert ", in 11 places:" in text


def test_values_that_agree_with_the_run_pass() -> None:
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
    }
    facts = _facts(
        world_size=2, accumulate_grad_batches=3, gradient_clip_val=1.0, optimizer={**ADAMW, "type": "DeepSpeedCPUAdam"}
    )
    assert deepspeed_config(DeepSpeedFields(config=config), facts)["train_batch_size"] == 12


@pytest.mark.parametrize(
    ("clip", "value", "algorithm", "text"),
    [
        (1.0, 0.5, "norm", "gradient_clipping is 1, but the Trainer's gradient_clip_val is 0.5: make them equal"),
        (0, 0.5, "norm", "gradient_clipping is 0, but the Trainer's gradient_clip_val is 0.5: make them equal"),
        (1.0, None, "norm", "is not set: set Trainer(gradient_clip_val=1)"),
        (0.5, 0.5, "value", "gradient_clipping is 0.5, which is by norm, but the Trainer's gradient_clip_algorithm is"),
        ("auto", 0.5, "value", None),
        (0.0, None, "norm", None),
        (0.5, 0.5, "norm", None),
    ],
)
def test_clipping_is_the_trainers(clip: Any, value: float | None, algorithm: str, text: str | None) -> None:
    facts = _facts(gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    if text is None:
        fields = DeepSpeedFields(config={"gradient_clipping": clip})
        assert deepspeed_config(fields, facts)["gradient_clipping"] == 0.0
    else:
        assert text in _contradiction({"gradient_clipping": clip}, facts)


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
    facts = _facts(micro_batch_size=micro, accumulate_grad_batches=accumulate, world_size=world)
    if None not in (micro, given_micro) and micro != given_micro:
        assert f"is {given_micro}, but the dataloader's batch size is {micro}" in _contradiction(config, facts)
        return
    result = deepspeed_config(fields, facts)
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
    assert text in _contradiction(config, _facts(**facts))


@pytest.mark.parametrize(("known", "expected"), [(None, 1), (0, 1), (1, 1), (7, 7)])
def test_warm_up_steps(known: int | None, expected: int) -> None:
    # DeepSpeed takes no warm-up of 0 steps.
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    result = deepspeed_config(DeepSpeedFields(config=config), _facts(warmup_steps=known))
    assert result["scheduler"]["params"] == {"warmup_num_steps": expected}


def test_hyperparameters_fall_back_to_each_other() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    result = deepspeed_config(DeepSpeedFields(config=config), _facts(optimizer=None, warmup_steps=5))
    # What no one knows is the optimizer's own default.
    assert result["optimizer"]["params"] == {"lr": 0.25}
    assert result["scheduler"]["params"] == {"warmup_max_lr": 0.25, "warmup_num_steps": 5}


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
    result = deepspeed_config(DeepSpeedFields(config=config), _facts(precision, aligned=aligned, optimizer=None))
    assert result["optimizer"]["params"] == {"lr": 0.5, **expected}


def test_buffers_are_no_larger_than_the_model() -> None:
    nvme = ParameterOffload(device="nvme", nvme_path="/x")
    fields = DeepSpeedFields(stage=3, offload_parameters=nvme)
    zero = deepspeed_config(fields, _facts())[ZERO]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == zero["offload_param"]["buffer_size"] == 10_000
    zero = deepspeed_config(fields, _facts(number_of_parameters=10**12))[ZERO]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == BUCKET
    assert zero["offload_param"]["buffer_size"] == NVME_BUFFER
    assert deepspeed_config(fields, _facts(number_of_parameters=None))[ZERO] == zero
    own = library.DeepSpeedConfig({"train_batch_size": 1, ZERO: {"offload_param": {"device": "cpu"}}}).zero_config
    assert own.reduce_bucket_size == own.allgather_bucket_size == BUCKET
    assert own.offload_param.buffer_size == NVME_BUFFER


def test_auto_buckets_without_a_hidden_size_are_the_defaults() -> None:
    stage3 = Stage3Options(prefetch_bucket_size="auto", param_persistence_threshold="auto")
    fields = DeepSpeedFields(stage=3, buckets=ZeroBuckets(reduce="auto"), stage3=stage3)
    zero = deepspeed_config(fields, _facts(hidden_size=None))[ZERO]
    assert zero["reduce_bucket_size"] == 10_000
    assert not {"stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"} & set(zero)


def test_pinned_memory_is_left_out_on_a_cpu() -> None:
    fields = DeepSpeedFields(stage=3, offload_optimizer=OptimizerOffload(), offload_parameters=ParameterOffload())
    for device, expected in (("cpu", False), ("cuda", None)):
        zero = deepspeed_config(fields, _facts(device_type=device))[ZERO]
        assert zero["offload_optimizer"].get("pin_memory") is zero["offload_param"].get("pin_memory") is expected


def test_the_engine_says_who_counts_micro_batches() -> None:
    for managed in (True, False):
        config = deepspeed_config(DeepSpeedFields(), _facts(), managed_accumulation=managed)
        assert _accepted(config).managed_gradient_accumulation is managed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_needs_stage_2_where_the_strategy_counts(stage: Any) -> None:
    fields = DeepSpeedFields(stage=stage, buckets=ZeroBuckets(overlap_comm=True))
    assert deepspeed_config(fields, _facts())[ZERO]["overlap_comm"] is True
    if stage >= 2:
        assert deepspeed_config(fields, _facts(), managed_accumulation=False)[ZERO]["overlap_comm"] is True
    else:
        with pytest.raises(ConfigurationError, match=f"overlap_comm is true with stage {stage}, but where"):
            deepspeed_config(fields, _facts(), managed_accumulation=False)


def test_the_result_is_the_same_in_every_call_and_any_order() -> None:
    content = json.loads((FILES / "zero3_offload.json").read_text())
    texts = set()
    for order in itertools.islice(itertools.permutations(content), 20):
        config = {key: content[key] for key in order}
        texts.add(dump_config(deepspeed_config(DeepSpeedFields(config=config), _facts())))
    assert len(texts) == 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("aligned", [False, True])
def test_a_dumped_configuration_can_be_given_again(stage: Any, aligned: bool, tmp_path: Path) -> None:
    facts = _facts("32-true" if stage == 0 else "bf16-mixed", aligned=aligned)
    config = deepspeed_config(DeepSpeedFields(stage=stage), facts)
    path = tmp_path / "ds.json"
    path.write_text(dump_config(config))
    again = DeepSpeedFields(config=str(path))
    check_fields(again, aligned)
    assert deepspeed_config(again, facts) == config


def test_a_value_that_json_does_not_have() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "maximize": torch.float32}}}
    assert "it holds a value that JSON does not have" in _contradiction(config, _facts(optimizer=None))


# ---- the tables against the installed DeepSpeed


class _Recorder(dict[str, Any]):
    """A configuration that remembers which keys DeepSpeed asks it for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Recorder:
        return self


def _asked_for(**content: Any) -> set[str]:
    recorder = _Recorder({"train_batch_size": 1, **content})
    library.DeepSpeedConfig(recorder)
    return recorder.asked


def test_the_table_of_keys_is_deepspeeds() -> None:
    table = keys.known_keys()
    known = {*table.keys, *table.aliases, *keys.FOREIGN, *keys.REMOVED}
    # Read by deepspeed.initialize before it makes this object, or only where processes are grouped.
    elsewhere = {"data_parallel_size", "sequence_parallel_size"}
    assert _asked_for() == known - elsewhere


@pytest.mark.parametrize(
    "name",
    ["activation_checkpointing", "aio", "flops_profiler", "data_types", "torch_autocast", "checkpoint", "optimizer"],
)
def test_the_tables_of_sections_are_deepspeeds(name: str) -> None:
    base = {"optimizer": {"type": "x"}, "torch_autocast": {"dtype": "bf16"}}.get(name, {})
    section = _Recorder(base)
    _asked_for(**{name: section})
    assert section.asked == set(keys.UNMODELLED[name].keys)


def test_removed_keys_are_deepspeeds() -> None:
    # Private tables: the public way, an error for each key, can't list them.
    assert set(keys.REMOVED) == set(library._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(keys.REMOVED_ZERO) == set(library._REMOVED_ZERO_CONFIG_KEYS)


def test_types_of_optimizers_and_schedulers_are_deepspeeds() -> None:
    from deepspeed.runtime import lr_schedules

    assert set(hyperparameters.OPTIMIZERS) == set(library.DEEPSPEED_OPTIMIZERS)
    assert list(hyperparameters.SCHEDULERS) == lr_schedules.VALID_LR_SCHEDULES
    params = {name for kind in hyperparameters.SCHEDULERS for name in hyperparameters._scheduler_params(kind) or ()}
    optimizers = {name for names in hyperparameters.OPTIMIZERS.values() for name in names}
    assert set(hyperparameters.KINDS) <= params | optimizers


def test_stage_3_compiles_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"compile is true with stage 3.*Use shard_fsdp"):
        build("shard_deepspeed_stage_3_aligned", compile=True)
    with pytest.raises(ConfigurationError, match="compile is true with stage 3"):
        ShardDeepSpeedStrategy(config={"zero_optimization": {"stage": 3}}, compile=True)
    assert build("shard_deepspeed_stage_2", compile=True).compile
    assert not build("shard_deepspeed_stage_3").compile
