"""Typed fields laid over ``config``: one mapping, and what the two say differently."""

import copy
import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, cast

from lightning_shard.engines.zero.config import fields as typed
from lightning_shard.engines.zero.config.reading import AUTO, canonical, get, put, read_config
from lightning_shard.engines.zero.config.sections import read_sections

DEFAULT_STAGE = 2  # The stage where neither the field nor ``config`` says one, as in stock Lightning.

ZERO = "zero_optimization"

_NAMES: dict[type, tuple[str, str, dict[str, str]]] = {
    typed.OptimizerOffload: ("offload_optimizer", "offload_optimizer.", {}),
    typed.ParameterOffload: ("offload_parameters", "offload_param.", {}),
    typed.ZeroBuckets: ("buckets", "", {"reduce": "reduce_bucket_size", "allgather": "allgather_bucket_size"}),
    typed.Stage3Options: (
        "stage3",
        "stage3_",
        {"sub_group_size": "sub_group_size", "leaf_modules": "leaf_module.classes"},
    ),
    typed.ZeroPlusPlus: ("zero_plus_plus", "zero_", {}),
}
"""Class of a typed group to its name, to the beginning of DeepSpeed's keys, and to those of other names."""

KEYS = {
    "stage": f"{ZERO}.stage",
    **{
        f"{group}.{f.name}": f"{ZERO}.{others.get(f.name, prefix + f.name)}"
        for options, (group, prefix, others) in _NAMES.items()
        for f in dataclasses.fields(options)
    },
    "communication_data_type": "communication_data_type",
}
"""Typed field to DeepSpeed's key."""

OffloadDevice = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Effective:
    """What the typed fields and ``config`` together ask for, as far as the engine is built by it."""

    stage: int  # 0 to 3.
    optimizer_device: OffloadDevice  # Where optimizer state is resident: "none" for the compute device.
    parameter_device: OffloadDevice  # Where parameter shards are resident: "none" for the compute device.
    communication_data_type: str | None  # "fp32", "bf16" or "fp16", in lower case; None: the precision policy's.
    has_optimizer: bool  # Whether there is a section ``optimizer``; else ``configure_optimizers`` must return one.
    counts_steps: bool  # Whether a schedule is as long as the fit (``total_num_steps: auto``).


def merge(fields: typed.DeepSpeedFields, problems: list[str]) -> dict[str, Any]:
    """One mapping of DeepSpeed's keys, with its "auto" values; problems are appended to ``problems``."""
    merged = canonical(read_config(fields.config), problems)
    read_sections(merged, problems)
    for name, path in KEYS.items():
        unset = getattr(fields, name.partition(".")[0]) is None
        value = None if unset else attrgetter(name)(fields)
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


def effective(merged: dict[str, Any]) -> Effective:
    """What the result of `merge` asks for, where it had no problems."""
    dtype = get(merged, "communication_data_type")
    return Effective(
        stage=get(merged, f"{ZERO}.stage"),
        optimizer_device=cast(OffloadDevice, get(merged, f"{ZERO}.offload_optimizer.device") or "none"),
        parameter_device=cast(OffloadDevice, get(merged, f"{ZERO}.offload_param.device") or "none"),
        communication_data_type=None if dtype in (None, AUTO) else dtype.lower(),
        has_optimizer="optimizer" in merged,
        counts_steps=get(merged, "scheduler.params.total_num_steps") == AUTO,
    )
