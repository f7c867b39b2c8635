"""The contract, the precision and the loss scale: which settings of a DeepSpeed file go with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime import config as library

from lightning_shard.engines.zero.config.fields import DeepSpeedFields, OptimizerOffload
from lightning_shard.engines.zero.config.reading import set_value, value_at
from lightning_shard.engines.zero.config.zero_settings import CONTRACT
from lightning_shard.errors import PrecisionError
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.policy import short
from lightning_shard.precision.words import PRECISIONS
from tests.engines.zero.config.support import (
    ZERO,
    accepted,
    configured,
    loss_scaling,
    refusal,
    run_facts,
    settings_of,
)


@pytest.mark.parametrize("path", sorted(CONTRACT))
def test_settings_that_break_the_contract_are_named(path: str) -> None:
    breaking = {
        "communication_data_type": "bf16",
        "data_types.grad_accum_dtype": "bf16",
        "data_types.buffer_dtype": "bf16",
        "gradient_predivide_factor": 2.0,
        "gradient_allreduce_op": "sum",
    }.get(path, True)
    allowed, rule = CONTRACT[path]
    config: dict[str, Any] = {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    set_value(config, path, breaking)
    if path == "torch_autocast.enabled":
        # In stage 3 DeepSpeed wants autocast's dtype.
        set_value(config, f"{ZERO}.stage", 1)
    text = refusal(config, aligned=True)
    assert f"{path} is {breaking!r} under aligned, but the contract is: {rule}." in text
    settings_of(DeepSpeedFields(config=config), aligned=False)
    for value in allowed:
        set_value(config, path, value)
        settings_of(DeepSpeedFields(config=config), aligned=True)


def test_the_contract_is_pinned_not_left_to_defaults() -> None:
    config = configured(DeepSpeedFields(stage=3), run_facts(aligned=True))
    pinned = {path: allowed[0] for path, (allowed, _) in CONTRACT.items() if allowed}
    left = {path for path, value in pinned.items() if value_at(config, path) != value}
    # Sections that the run does not have.
    assert {path.partition(".")[0] for path in left} == {"fp16", "torch_autocast"}
    assert config[ZERO]["ignore_unused_parameters"] is True
    # A plain name leaves DeepSpeed its defaults.
    assert "memory_efficient_linear" not in configured(DeepSpeedFields(stage=3), run_facts())[ZERO]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_deepspeed_takes_every_precision(precision: str, stage: Any, offload: bool, aligned: bool) -> None:
    offloaded = OptimizerOffload() if offload else None
    fields = DeepSpeedFields(stage=stage, offload_optimizer=offloaded)
    settings_of(fields, aligned=aligned)
    facts = run_facts(precision, aligned=aligned)
    policy = facts.policy
    if precision == "16-true" and not aligned and not offload:
        with pytest.raises(PrecisionError, match="shard_deepspeed_stage_2_offload"):
            configured(fields, facts)
        return
    taken = accepted(configured(fields, facts))
    assert taken.float16_config.enabled == (policy.compute == torch.float16)
    assert taken.bfloat16_config.enabled == (policy.compute == torch.bfloat16)
    assert taken.communication_data_type == policy.reduce
    assert taken.grad_accum_dtype == short(policy.accumulate)
    low = policy.is_low_memory
    assert taken.bfloat16_config.bf16_master_weights_and_grads == (low and policy.master == torch.bfloat16)
    assert taken.bfloat16_config.bf16_optimizer_states == (low and policy.master == torch.bfloat16)
    assert taken.float16_config.fp16_master_weights_and_grads == (low and policy.master == torch.float16)
    # Never DeepSpeed's own scale, and never its own clipping, whose default is 1.0.
    assert taken.float16_config.loss_scale == (1.0 if taken.float16_config.enabled else 0)
    assert taken.gradient_clipping == 0.0
    assert taken.zero_allow_untested_optimizer is True
    assert taken.zero_force_ds_cpu_optimizer is False
    explicit = {"zero_force_ds_cpu_optimizer": True, ZERO: {"stage": stage, "ignore_unused_parameters": False}}
    taken = accepted(configured(replace(fields, config=explicit), facts))
    assert taken.zero_force_ds_cpu_optimizer is True
    assert taken.zero_config.ignore_unused_parameters is False


def test_loss_scales() -> None:
    assert loss_scaling(None) is loss_scaling({"fp16": {"enabled": "auto"}}) is None
    assert loss_scaling({"fp16": {"enabled": False, "loss_scale": 128}}) is None
    given = {"loss_scale": "0", "initial_scale_power": 12, "loss_scale_window": "5e2", "hysteresis": 1}
    assert loss_scaling({"fp16": {**given, "min_loss_scale": 2}}) == LossScaling(
        initial=4096, growth_interval=500, hysteresis=1, minimum=2
    )
    # DeepSpeed's own defaults, where a section says something and leaves something out.
    own = library.DeepSpeedConfig({"train_batch_size": 1}).float16_config
    assert loss_scaling({"fp16": {"loss_scale": 0}}) == LossScaling(
        initial=own.initial_dynamic_scale(),
        growth_interval=own.loss_scale_window,
        hysteresis=own.hysteresis,
        minimum=own.min_loss_scale,
    )


@pytest.mark.parametrize(
    ("fp16", "text"),
    [
        ({"loss_scale": 128}, "fp16.loss_scale is 128.0, but on every engine here the loss scale is dynamic"),
        ({"min_loss_scale": 3}, "The fp16 section (min_loss_scale 3) can't be used: loss_scale.minimum is 3.0"),
    ],
)
def test_loss_scales_without_an_equal(fp16: dict[str, Any], text: str) -> None:
    assert text in refusal({"fp16": {"enabled": True, **fp16}})
