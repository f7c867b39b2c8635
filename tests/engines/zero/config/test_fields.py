"""Typed fields: each reaches DeepSpeed, agrees with the file or is refused, and comes from YAML."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser

from lightning_shard.engines.zero.config.fields import (
    DeepSpeedFields,
    OptimizerOffload,
    ParameterOffload,
    Stage3Options,
    ZeroBuckets,
    ZeroPlusPlus,
)
from lightning_shard.engines.zero.config.reading import set_value, value_at
from lightning_shard.engines.zero.config.zero_settings import KEYS, read_settings
from tests.engines.zero.config.support import ZERO, accepted, configured, refusal, run_facts, settings_of

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
    assert set(names) == set(KEYS) == set(TYPED)


@pytest.mark.parametrize("name", sorted(TYPED))
def test_typed_fields_reach_deepspeed(name: str) -> None:
    fields, value = TYPED[name]
    path = KEYS[name]
    config = configured(fields, run_facts(world_size=2))
    assert value_at(config, path) == value
    # One process, for DeepSpeed's own check of the batch size; hpZ is checked against the group later.
    config["train_batch_size"] = 2
    taken: Any = accepted(config)
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
    path = KEYS[name]
    other = {
        bool: lambda v: not v,
        int: lambda v: 2 if name == "stage" else v + 1,
        float: lambda v: v / 2,
        str: lambda v: {"nvme": "cpu", "bf16": "fp16"}.get(v, "/other"),
        list: lambda v: [*v, "Other"],
    }[type(value)](value)
    config: dict[str, Any] = {}
    set_value(config, path, other)
    text = refusal(config, **{f.name: getattr(fields, f.name) for f in fields_of(fields) if f.name != "config"})
    assert f"{name} is {value!r}, but config's {path} is {other!r}: remove one of the two" in text
    set_value(config, path, value)
    assert value_at(read_settings(replace(fields, config=config), aligned=False, problems=[]).merged, path) == value
    set_value(config, path, "auto")
    assert value_at(read_settings(replace(fields, config=config), aligned=False, problems=[]).merged, path) == value


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (
            {"offload_parameters": ParameterOffload()},
            "offload_parameters is 'cpu' with stage 2, but only stage 3 shards",
        ),
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
        ({"zero_plus_plus": ZeroPlusPlus(hpz_partition_size=2)}, "zero_hpz_partition_size is 2 with stage 2, but Z"),
        (
            {
                "stage": 3,
                "zero_plus_plus": ZeroPlusPlus(hpz_partition_size=2),
                "offload_parameters": ParameterOffload(device="nvme", nvme_path="/x"),
            },
            "zero_hpz_partition_size is 2 with offload_parameters 'nvme', but DeepSpeed keeps no second copy of",
        ),
        (
            {"stage": 3, "zero_plus_plus": ZeroPlusPlus(quantized_nontrainable_weights=True)},
            "zero_quantized_nontrainable_weights is true, but DeepSpeed 0.19 copies frozen parameters into int8 with",
        ),
        ({"zero_plus_plus": ZeroPlusPlus(quantized_weights=True)}, "zero_quantized_weights is True with stage 2"),
        ({"zero_plus_plus": ZeroPlusPlus(quantized_gradients=True)}, "zero_quantized_gradients is True with stage 2"),
        (
            {"config": {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}},
            f"{ZERO}.offload_optimizer.ratio is 0.5, but DeepSpeed would step the part on the device by an AdamW of",
        ),
        (
            {"config": {ZERO: {"offload_optimizer": {"device": "cpu", "super_offload": True}}}},
            f"{ZERO}.offload_optimizer.super_offload is True, but it steps in a process of its own, whose state no",
        ),
        ({"config": {ZERO: {"zenflow": {"topk_ratio": 0.1}}}}, "0.1}, but it steps a part of a gradient late, by"),
        (
            {"stage": 3, "config": {"prescale_gradients": True}},
            "prescale_gradients is True with stage 3, which divides gradients before their sum only if it does not",
        ),
        ({"config": {"gradient_predivide_factor": 2}}, "Remove it, or set buckets.reduce_scatter: false"),
        (
            {"config": {"gradient_clipping": -1}},
            "gradient_clipping is -1, but DeepSpeed's rule is: Input should be greater than or equal to 0",
        ),
        (
            {"buckets": ZeroBuckets(reduce=-1)},
            f"{ZERO}.reduce_bucket_size is -1, but DeepSpeed's rule is: Input should",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other(typed: dict[str, Any], text: str) -> None:
    assert text in refusal(typed.pop("config", {}), **typed)


def test_what_divides_gradients_before_their_sum_is_taken_where_deepspeed_does() -> None:
    config = {"gradient_predivide_factor": 2.0, "prescale_gradients": True}
    settings_of(DeepSpeedFields(stage=1, config=config))
    settings_of(DeepSpeedFields(stage=2, config={**config, "gradient_allreduce_op": "sum"}))
    settings_of(DeepSpeedFields(stage=3, config=config, buckets=ZeroBuckets(reduce_scatter=False)))


def test_what_the_engine_is_built_by() -> None:
    asked = settings_of(DeepSpeedFields())
    assert (asked.stage, asked.optimizer_device, asked.parameter_device) == (2, "none", "none")
    assert (asked.communication_data_type, asked.counts_steps) == (None, False)
    config = {
        ZERO: {"stage": "3", "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}},
        "communication_data_type": "FP32",
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    asked = settings_of(DeepSpeedFields(config=config))
    assert (asked.stage, asked.optimizer_device, asked.parameter_device) == (3, "none", "cpu")
    assert (asked.communication_data_type, asked.counts_steps) == ("fp32", True)


@pytest.mark.parametrize("group", [OptimizerOffload, ParameterOffload, ZeroBuckets, Stage3Options, ZeroPlusPlus])
def test_every_field_has_a_text_for_help(group: type) -> None:
    # jsonargparse's own source of texts.
    texts = {p.arg_name: p.description for p in parse_from_object(group).params}
    assert set(texts) == {field.name for field in fields_of(group)}
    assert all(text and len(text.split()) >= 4 for text in texts.values())


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
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 6},
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
        offload_optimizer=OptimizerOffload(device="nvme", nvme_path="/nvme", buffer_count=6),
        buckets=ZeroBuckets(reduce="auto", allgather=1000),
        stage3=Stage3Options(leaf_modules=["MoE"]),
        config={"fp16": {"enabled": "auto"}},
    )
