"""All settings of a strategy are compared between ranks, and nothing about them is read twice."""

from __future__ import annotations

import inspect
import json
from itertools import combinations
from typing import Any

import pytest

from lightning_shard import PreemptionConfig, ShardDDPStrategy, ShardDeepSpeedStrategy, ShardFSDPStrategy, registry
from lightning_shard.engines.memory_model import plain_settings
from lightning_shard.engines.zero.config.fields import OptimizerOffload, Stage3Options, ZeroBuckets, ZeroPlusPlus
from lightning_shard.errors import WrappingError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies import strategy as strategy_module
from lightning_shard.strategies.strategy import ShardStrategy


def compared(strategy: ShardStrategy) -> dict[str, Any]:
    """What ranks tell each other of a strategy, as text."""
    settings = {**plain_settings(strategy._settings), **strategy.engine_for().resolved_config()}
    return json.loads(json.dumps({"class": type(strategy).__name__, **settings}))


def test_no_two_names_say_the_same() -> None:
    said = {name: compared(registry.build(name)) for name in registry.PRESETS}
    assert [(one, other) for one, other in combinations(said, 2) if said[one] == said[other]] == []


def hook(state: Any, bucket: Any) -> Any:
    return bucket


COMMON: dict[str, Any] = {
    "activation_checkpointing": ["Block"],
    "compile": True,
    "log_grad_norm": True,
    "error_if_nonfinite": True,
    "timeout_seconds": 7.0,
    "process_group_backend": "gloo",
    "init_timeout_seconds": 8.0,
    "lost_rank_seconds": 9.0,
    "stuck_seconds": 10.0,
    "preemption": PreemptionConfig(exit_code=3),
    "async_save": True,
    "save_frozen": False,
    "sample_seeds": True,
    "resume_hyperparameters": "configuration",
}
CHANGED: list[tuple[type[ShardStrategy], dict[str, Any]]] = [
    (
        ShardDDPStrategy,
        {
            **COMMON,
            "aligned": True,
            "accumulate_sync": "micro_batch",
            "find_unused_parameters": True,
            "static_graph": True,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
            "bucket_cap_mb": 3.0,
            "comm_hook": "bf16_compress",
        },
    ),
    (
        ShardFSDPStrategy,
        {
            **COMMON,
            "aligned": True,
            "accumulate_sync": "boundary",
            "mesh": MeshConfig(replicate=2),
            "units": ["Block"],
            "reshard_after_forward": False,
            "cpu_offload": True,
            "forward_prefetch": 1,
            "backward_prefetch": 1,
            "ignored_modules": ["Block"],
            "forward_methods": ["sample"],
        },
    ),
    (
        ShardDeepSpeedStrategy,
        {
            **{name: value for name, value in COMMON.items() if name != "compile"},
            "aligned": True,
            "stage": 3,
            "offload_optimizer": OptimizerOffload(device="cpu"),
            "buckets": ZeroBuckets(reduce=1000),
            "stage3": Stage3Options(sub_group_size=1000),
            "zero_plus_plus": ZeroPlusPlus(quantized_weights=True),
            "communication_data_type": "fp32",
            "config": {"wall_clock_breakdown": True},
        },
    ),
]
CASES = [
    pytest.param(kind, name, value, id=f"{kind.__name__}.{name}")
    for kind, arguments in CHANGED
    for name, value in arguments.items()
]


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_every_setting_is_compared(kind: type[ShardStrategy], name: str, value: Any) -> None:
    needed = {"stage": 3} if name in ("zero_plus_plus", "stage3") else {}
    before, after = compared(kind(**needed)), compared(kind(**needed, **{name: value}))
    assert before != after
    assert compared(kind(**needed, **{name: value})) == after


def test_functions_and_objects_have_no_addresses_in_them() -> None:
    said = json.dumps(compared(ShardDDPStrategy(comm_hook=hook, comm_state=object())))
    assert "0x" not in said
    assert "test_settings.hook" in said


def test_offloaded_inputs_are_refused_with_compile() -> None:
    with pytest.raises(WrappingError, match="'offload' and compile is true, but a compiled unit saves all tensors"):
        ShardFSDPStrategy(activation_checkpointing="offload", compile=True).engine_for()


def test_the_base_stays_a_list_of_calls() -> None:
    assert len(inspect.getsource(strategy_module).splitlines()) <= 465
    functions = [value for value in vars(ShardStrategy).values() if inspect.isfunction(value)]
    assert len(functions) > 40
    too_long = {f.__name__: n for f in functions if (n := len(inspect.getsource(f).splitlines())) > 26}
    # The constructor lists the parts.
    assert too_long.keys() <= {"__init__"}
