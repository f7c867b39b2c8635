"""Typed fields laid over ``config``: one mapping, and what the two say differently."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, cast

from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.engines.zero.config.hyperparameters import read_sections
from lightning_shard.engines.zero.config.reading import AUTO, canonical, read_config
from lightning_shard.errors import ConfigurationError

DEFAULT_STAGE = 2
"""The stage where neither the field nor ``config`` says one, as in stock Lightning."""

ZERO = "zero_optimization"

KEYS = {
    "stage": f"{ZERO}.stage",
    "offload_optimizer.device": f"{ZERO}.offload_optimizer.device",
    "offload_optimizer.nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
    "offload_optimizer.pin_memory": f"{ZERO}.offload_optimizer.pin_memory",
    "offload_optimizer.buffer_count": f"{ZERO}.offload_optimizer.buffer_count",
    "offload_optimizer.fast_init": f"{ZERO}.offload_optimizer.fast_init",
    "offload_optimizer.ratio": f"{ZERO}.offload_optimizer.ratio",
    "offload_parameters.device": f"{ZERO}.offload_param.device",
    "offload_parameters.nvme_path": f"{ZERO}.offload_param.nvme_path",
    "offload_parameters.pin_memory": f"{ZERO}.offload_param.pin_memory",
    "offload_parameters.buffer_count": f"{ZERO}.offload_param.buffer_count",
    "offload_parameters.buffer_size": f"{ZERO}.offload_param.buffer_size",
    "offload_parameters.max_in_cpu": f"{ZERO}.offload_param.max_in_cpu",
    "buckets.reduce": f"{ZERO}.reduce_bucket_size",
    "buckets.allgather": f"{ZERO}.allgather_bucket_size",
    "buckets.overlap_comm": f"{ZERO}.overlap_comm",
    "buckets.contiguous_gradients": f"{ZERO}.contiguous_gradients",
    "buckets.reduce_scatter": f"{ZERO}.reduce_scatter",
    "buckets.round_robin_gradients": f"{ZERO}.round_robin_gradients",
    "stage3.prefetch_bucket_size": f"{ZERO}.stage3_prefetch_bucket_size",
    "stage3.param_persistence_threshold": f"{ZERO}.stage3_param_persistence_threshold",
    "stage3.model_persistence_threshold": f"{ZERO}.stage3_model_persistence_threshold",
    "stage3.max_live_parameters": f"{ZERO}.stage3_max_live_parameters",
    "stage3.max_reuse_distance": f"{ZERO}.stage3_max_reuse_distance",
    "stage3.sub_group_size": f"{ZERO}.sub_group_size",
    "stage3.module_granularity_threshold": f"{ZERO}.stage3_module_granularity_threshold",
    "stage3.leaf_modules": f"{ZERO}.leaf_module.classes",
    "zero_plus_plus.hpz_partition_size": f"{ZERO}.zero_hpz_partition_size",
    "zero_plus_plus.quantized_weights": f"{ZERO}.zero_quantized_weights",
    "zero_plus_plus.quantized_nontrainable_weights": f"{ZERO}.zero_quantized_nontrainable_weights",
    "zero_plus_plus.quantized_gradients": f"{ZERO}.zero_quantized_gradients",
    "communication_data_type": "communication_data_type",
}
"""Typed field to DeepSpeed's key."""

OffloadDevice = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Effective:
    """What the typed fields and ``config`` together ask for, as far as the engine is built by it."""

    stage: int
    """0 to 3."""

    optimizer_device: OffloadDevice
    """Where optimizer state waits: "none" for the compute device."""

    parameter_device: OffloadDevice
    """Where parameter shards wait: "none" for the compute device."""

    communication_data_type: str | None
    """"fp32", "bf16" or "fp16", in lower case; None: not set, the precision policy's."""

    optimizer_type: str | None
    """Type of the ``optimizer`` section; None: there is none, and ``configure_optimizers`` must give one."""

    scheduler_type: str | None
    """Type of the ``scheduler`` section; None: there is none."""


def merge(fields: DeepSpeedFields, problems: list[str]) -> dict[str, Any]:
    """One mapping of DeepSpeed's keys, "auto" values left in it; problems are appended to ``problems``.

    Raises:
        ConfigurationError: ``config`` can't be read at all.
    """
    merged = canonical(read_config(fields.config), problems)
    read_sections(merged, problems)
    for name, path in KEYS.items():
        value = _typed(fields, name)
        if value is None:
            continue
        there = get(merged, path)
        if there not in (None, AUTO) and there != value:
            problems.append(
                f"{name} is {value!r}, but config's {path} is {there!r}: remove one of the two, or make them equal"
            )
        put(merged, path, copy.copy(value))
    for section in ("offload_optimizer", "offload_param"):
        if get(merged, f"{ZERO}.{section}.device") in (None, AUTO, "none"):
            merged.get(ZERO, {}).pop(section, None)
    if get(merged, f"{ZERO}.stage") in (None, AUTO):
        put(merged, f"{ZERO}.stage", DEFAULT_STAGE)
    return merged


def _typed(fields: DeepSpeedFields, name: str) -> Any:
    group, _, _ = name.partition(".")
    return None if getattr(fields, group) is None else attrgetter(name)(fields)


def get(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, with the sections that lead to it."""
    *sections, key = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value


def effective(fields: DeepSpeedFields) -> Effective:
    """What the fields ask for; they have passed `check_fields`."""
    return effective_of(merge(fields, []))


def effective_of(merged: dict[str, Any]) -> Effective:
    """The same of what `merge` gave."""
    dtype = get(merged, "communication_data_type")
    return Effective(
        stage=get(merged, f"{ZERO}.stage"),
        optimizer_device=cast(OffloadDevice, get(merged, f"{ZERO}.offload_optimizer.device") or "none"),
        parameter_device=cast(OffloadDevice, get(merged, f"{ZERO}.offload_param.device") or "none"),
        communication_data_type=None if dtype in (None, AUTO) else dtype.lower(),
        optimizer_type=get(merged, "optimizer.type"),
        scheduler_type=get(merged, "scheduler.type"),
    )


def raise_problems(problems: list[str], rule: str) -> None:
    """Raise one error with all problems, if there are any.

    Raises:
        ConfigurationError: ``rule`` and the problems, one a line.
    """
    if len(problems) == 1:
        raise ConfigurationError(f"{rule}: {problems[0]}.")
    if problems:
        lines = "".join(f"\n  - {problem}." for problem in problems)
        raise ConfigurationError(f"{rule}, in {len(problems)} places:{lines}")
