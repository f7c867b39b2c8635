"""Arguments in Python are read by their annotations, as YAML is, and refused where they don't fit."""

from __future__ import annotations

import pickle
import tomllib
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from lightning_shard import (
    ConfigurationError,
    MeshConfig,
    MeshError,
    PrecisionError,
    PreemptionConfig,
    ShardDDPStrategy,
    ShardDeepSpeedStrategy,
    ShardFSDPStrategy,
    ShardPrecision,
    UnitRule,
)
from lightning_shard.engines.memory_model import plain_settings
from lightning_shard.engines.zero.config.fields import OptimizerOffload, ParameterOffload
from tests import typed_user
from tests.harness import ROOT


def settings(strategy: Any) -> dict[str, Any]:
    return {**plain_settings(strategy._settings), **strategy.engine_for().resolved_config()}


EQUAL: list[tuple[type[Any], dict[str, Any], dict[str, Any]]] = [
    (ShardFSDPStrategy, {"mesh": {"replicate": 2}}, {"mesh": MeshConfig(replicate=2)}),
    (ShardFSDPStrategy, {"units": [nn.Linear, "Block"]}, {"units": ["Linear", "Block"]}),
    (
        ShardFSDPStrategy,
        {"units": [{"modules": [nn.Linear], "reshard_after_forward": False}, {"pattern": "a", "compute": "fp32"}]},
        {"units": [UnitRule(modules=["Linear"], reshard_after_forward=False), UnitRule(pattern="a", compute="fp32")]},
    ),
    (ShardFSDPStrategy, {"units": "1000"}, {"units": 1000}),
    (ShardFSDPStrategy, {"activation_checkpointing": [nn.Linear]}, {"activation_checkpointing": ["Linear"]}),
    (ShardFSDPStrategy, {"reshard_after_forward": numpy.int64(2)}, {"reshard_after_forward": 2}),
    (
        ShardFSDPStrategy,
        {"preemption": {"signals": ["SIGUSR2"], "exit_code": "3"}},
        {"preemption": PreemptionConfig(signals=("SIGUSR2",), exit_code=3)},
    ),
    (
        ShardDeepSpeedStrategy,
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_parameters": {}},
        {"stage": 3, "offload_optimizer": OptimizerOffload(), "offload_parameters": ParameterOffload()},
    ),
    (
        ShardDDPStrategy,
        {"comm_hook": "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook"},
        {"comm_hook": powerSGD_hook},
    ),
]


@pytest.mark.parametrize(("kind", "written", "typed"), EQUAL, ids=lambda value: getattr(value, "__name__", None))
def test_strings_and_mappings_build_the_same_objects(
    kind: type[Any], written: dict[str, Any], typed: dict[str, Any]
) -> None:
    assert settings(kind(**written)) == settings(kind(**typed)) != settings(kind())


def test_a_torch_dtype_is_taken_for_its_name() -> None:
    given = ShardPrecision("bf16-mixed", reduce=torch.bfloat16).policy(aligned=False)  # type: ignore[arg-type]
    assert given.reduce is torch.bfloat16


REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (ShardFSDPStrategy, {"aligned": "false"}, "aligned is 'false', but must be True or False. Write aligned=False."),
    (ShardFSDPStrategy, {"mesh": (1, 2)}, "or None. Write mesh={'replicate': 1, 'shard': 2}."),
    (ShardFSDPStrategy, {"activation_checkpointing": True}, "Write activation_checkpointing='units'."),
    (ShardDeepSpeedStrategy, {"offload_optimizer": True}, "Write offload_optimizer={'device': 'cpu'}."),
    (ShardFSDPStrategy, {"units": "Block"}, "Write units=['Block']."),
    (ShardFSDPStrategy, {"mesh": {"replicas": 2}}, "mesh has no argument 'replicas'. Did you mean replicate?"),
    (ShardFSDPStrategy, {"mesh": 2}, "mesh is 2, but must be MeshConfig, a mapping (replicate, shard) or None."),
    (ShardFSDPStrategy, {"units": [3]}, "an integer or a list of names or classes or mappings (modules, pattern, "),
    (ShardFSDPStrategy, {"units": [{"pattern": "a["}]}, "units' pattern 'a[' is no regular expression: unterminated"),
    (ShardFSDPStrategy, {"units": [{"pattern": "a", "modules": 3}]}, "modules is 3 and pattern is 'a' in an entry"),
    (ShardFSDPStrategy, {"timeout_seconds": -1}, "-1.0, but must be a number of seconds greater than 0."),
    (ShardFSDPStrategy, {"accumulate_sync": "boundry"}, "'boundary' or 'micro_batch'. Did you mean boundary?"),
    (ShardFSDPStrategy, {"auto_wrap_policy": {nn.Linear}}, "Use units, with class names or a number of parameters."),
    (ShardFSDPStrategy, {"reshard_after_forwards": True}, "Did you mean reshard_after_forward"),
    (ShardDeepSpeedStrategy, {"stage": True}, "stage is True, but must be 0, 1, 2, 3 or None."),
    (ShardDDPStrategy, {"comm_hook": "nowhere"}, "a function or its import path or None."),
    (ShardPrecision, {"precision": "fp16"}, "precision is 'fp16', but must be '32-true', 'bf16-mixed', "),
    (ShardPrecision, {"precision": "16-mixed", "loss_scale": {"initial": 3}}, "loss_scale.initial is 3.0, but must be"),
]


@pytest.mark.parametrize(("kind", "given", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_does_not_fit_is_refused_at_construction(kind: type[Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        kind(**given)
    assert message in str(refused.value)
    assert isinstance(refused.value, {MeshConfig: MeshError, ShardPrecision: PrecisionError}.get(kind, Exception))


def test_checked_dataclasses_stay_dataclasses() -> None:
    mesh = replace(MeshConfig(replicate="2"), shard="auto")
    assert mesh == MeshConfig(replicate=2)
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_a_script_with_types_gives_what_is_taken() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert "tests/typed_user.py" in files, "mypy checks it with the package"
    assert len(typed_user.strategies()) == 9
    assert typed_user.precisions()[0].sets_loss_scale
