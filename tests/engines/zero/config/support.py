"""The facts of a run that the tests of DeepSpeed's configuration share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as library

from lightning_shard.engines.engine import TrainerFacts
from lightning_shard.engines.zero.config.building import deepspeed_config
from lightning_shard.engines.zero.config.fields import DeepSpeedFields, RunFacts
from lightning_shard.engines.zero.config.zero_settings import RULE, ZeroSettings, read_settings
from lightning_shard.errors import ConfigurationError, raise_problems
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.policy import policy_from

FILES = Path(__file__).parent / "files"
ZERO = "zero_optimization"
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.05}


def run_facts(precision: str = "bf16-mixed", *, aligned: bool = False, **others: Any) -> RunFacts:
    trainer: dict[str, Any] = {"micro_batch_size": 2}
    trainer |= {
        name: others.pop(name) for name in list(others) if name in vars(TrainerFacts()) and name != "total_steps"
    }
    facts = RunFacts(
        ranks=others.pop("world_size", 1),
        per_node=1,
        device_type="cpu",
        policy=policy_from(precision, aligned=aligned),
        aligned=aligned,
        accumulate_grad_batches=trainer.get("accumulate_grad_batches", 1),
        trainer=TrainerFacts(**trainer),
        optimizer=ADAMW,
        total_steps=500,
        hidden_size=64,
        number_of_parameters=10_000,
    )
    return replace(facts, **others)


def accepted(config: dict[str, Any]) -> library.DeepSpeedConfig:
    """DeepSpeed's own reading, in one process without a group."""
    return library.DeepSpeedConfig(json.loads(json.dumps(config, sort_keys=True)))


def settings_of(fields: DeepSpeedFields, *, aligned: bool = False) -> ZeroSettings:
    problems: list[str] = []
    settings = read_settings(fields, aligned=aligned, problems=problems)
    raise_problems(problems, RULE)
    return settings


def configured(fields: DeepSpeedFields, facts: RunFacts) -> dict[str, Any]:
    """The configuration for DeepSpeed, even if the strategy would refuse the fields."""
    return deepspeed_config(read_settings(fields, aligned=False, problems=[]), facts)


def refusal(config: Mapping[str, Any] | str, *, aligned: bool = False, **typed: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        settings_of(DeepSpeedFields(config=config, **typed), aligned=aligned)
    return str(caught.value)


def loss_scaling(config: Any) -> LossScaling | None:
    """The loss scale that a configuration asks for."""
    return settings_of(DeepSpeedFields(config=config)).loss_scaling


def contradiction(config: Mapping[str, Any], facts: RunFacts) -> str:
    with pytest.raises(ConfigurationError) as caught:
        configured(DeepSpeedFields(config=dict(config)), facts)
    return str(caught.value)
