"""Typed fields: each reaches DeepSpeed, agrees with the file or is refused, and comes from YAML."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.engines.zero.config.support import ZERO, accepted, configured, refusal, run_facts

GROUPS: dict[str, type[Any]] = {
    "offload_optimizer": OptimizerOffload,
    "offload_parameters": ParameterOffload,
    "buckets": ZeroBuckets,
    "stage3": Stage3Options,
    "zero_plus_plus": ZeroPlusPlus,
}
# Values other than DeepSpeed's defaults by field, and else by type.
VALUES = {"device": "nvme", "nvme_path": "/nvme", "leaf_modules": ["MoE"], "hpz_partition_size": 2}
ON = (
    "fast_init",
    "round_robin_gradients",
    "quantized_weights",
    "quantized_nontrainable_weights",
    "quantized_gradients",
)

TYPED: dict[str, tuple[DeepSpeedFields, Any]] = {
    "stage": (DeepSpeedFields(stage=3), 3),
    "communication_data_type": (DeepSpeedFields(communication_data_type="bf16"), "bf16"),
}
for _group, _cls in GROUPS.items():
    for _number, _field in enumerate(fields_of(_cls)):
        _value = VALUES.get(_field.name, _field.name in ON if "bool" in str(_field.type) else 6 + _number)
        _given: Any = {_group: _cls(**{_field.name: _value})}
        TYPED[f"{_group}.{_field.name}"] = (DeepSpeedFields(stage=3, **_given), _value)


def test_every_typed_field_has_a_key() -> None:
    assert {field.name for field in fields_of(DeepSpeedFields)} == {
        *GROUPS,
        "stage",
        "communication_data_type",
        "config",
    }
    assert set(KEYS) == set(TYPED)


@pytest.mark.parametrize("name", sorted(TYPED))
def test_a_typed_field_reaches_deepspeed_and_agrees_with_the_config(name: str) -> None:
    fields, value = TYPED[name]
    path = KEYS[name]
    config = configured(fields, run_facts(world_size=2))
    assert value_at(config, path) == value
    # One process, for DeepSpeed's own check of the batch size.
    config["train_batch_size"] = 2
    taken: Any = accepted(config)
    if path == "communication_data_type":
        assert taken.communication_data_type is torch.bfloat16
    else:
        taken = taken.zero_config
        for key in path.split(".")[1:]:
            taken = getattr(taken, key, None) if hasattr(taken, key) else getattr(taken, key.removeprefix("stage3_"))
        assert (str(taken) if isinstance(taken, Path) else taken) == value
    other = {
        bool: lambda v: not v,
        int: lambda v: 2 if name == "stage" else v + 1,
        str: lambda v: {"nvme": "cpu", "bf16": "fp16"}.get(v, "/other"),
        list: lambda v: [*v, "Other"],
    }[type(value)](value)
    given: dict[str, Any] = {}
    set_value(given, path, other)
    text = refusal(given, **{f.name: getattr(fields, f.name) for f in fields_of(fields) if f.name != "config"})
    assert f"{name} is {value!r}, but config's {path} is {other!r}: remove one of the two" in text
    for same in (value, "auto"):
        set_value(given, path, same)
        assert value_at(read_settings(replace(fields, config=given), aligned=False, problems=[]).merged, path) == value


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ({"offload_parameters": ParameterOffload()}, "offload_parameters is 'cpu' with stage 2, but needs stage 3"),
        (
            {"stage": 3, "offload_parameters": ParameterOffload(device="nvme")},
            "offload_parameters is 'nvme' without nvme_path",
        ),
        ({"zero_plus_plus": ZeroPlusPlus(hpz_partition_size=2)}, "zero_hpz_partition_size is 2 with stage 2, but Z"),
        (
            {"stage": 3, "zero_plus_plus": ZeroPlusPlus(quantized_nontrainable_weights=True)},
            "zero_quantized_nontrainable_weights is true, but DeepSpeed 0.19 copies frozen parameters into int8 with",
        ),
        (
            {"config": {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}},
            f"{ZERO}.offload_optimizer.ratio is 0.5, but it steps a part of the parameters by an optimizer of its own",
        ),
        (
            {"config": {ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme", "pipeline_write": True}}}},
            "offload_optimizer.pipeline_write is true, but state in files",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other(typed: dict[str, Any], text: str) -> None:
    assert text in refusal(typed.pop("config", {}), **typed)
