"""Read the ``fsdp_config`` of Accelerate and transformers, of both FSDP versions, into neutral settings."""

from collections.abc import Mapping
from typing import Any

from lightning_shard.migrate.neutral import Field, Reading, described, shown

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of FSDP version 1's strategies. Files may also have their numbers in this list, from 1."""

SHARDING: Mapping[Any, str] = {
    **dict(enumerate(STRATEGIES, 1)),
    **{name: name for name in STRATEGIES},
    "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2",
}
"""Their spellings. The last one is torch's, in stock Lightning."""

POLICIES = {"TRANSFORMER_BASED_WRAP": "classes", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}

FSDP = described("fsdp_config")
FSDP_2 = {**FSDP, **described("fsdp_config_2")}

OLD_FSDP = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
"""Old spelling to new. Keys without their ``fsdp_`` are read too, as by Accelerate."""


def read_fsdp(reading: Reading, section: Mapping[str, Any]) -> None:
    content = reading.prefixed("fsdp_config", section, "fsdp_", FSDP, OLD_FSDP)
    version = str(content.get("fsdp_version", 1))
    if version not in ("1", "2"):
        reading.problems.append(f"fsdp_config.fsdp_version is {version!r}, but must be 1 or 2")
    else:
        reading.ask("fsdp_version", 2, "fsdp_config.fsdp_version", int(version))
    checkpoints = "fsdp_activation_checkpointing"
    if str(content.get(offloads := f"{checkpoints}_offload")).lower() == "true":
        # Accelerate reads it only with activation checkpointing.
        both = str(content.get(checkpoints)).lower() == "true"
        met = checkpoints if both else offloads
        reading.meet(f"fsdp_config.{met}", True, "offload includes it" if both else "nothing is checkpointed")
        content = {name: value for name, value in content.items() if name != met}
    read = reading.read_fields("fsdp_config", FSDP_2 if version == "2" else FSDP, content)
    _read_sharding(reading, content, version, read["fsdp_reshard_after_forward"] if version == "2" else None)
    _read_wrapping(reading, content, read["fsdp_transformer_layer_cls_to_wrap"] or None, read["fsdp_min_num_params"])
    if read["fsdp_cpu_ram_efficient_loading"] and read["fsdp_sync_module_states"] is False:
        reading.problems.append(
            "fsdp_config.fsdp_cpu_ram_efficient_loading is true with fsdp_sync_module_states false, so the others "
            "have no values, which Accelerate refuses too"
        )


def _read_sharding(reading: Reading, content: Mapping[str, Any], version: str, level: str | None) -> None:
    """Read the sharding fields. ``level``: the value of version 2's own field, None without it."""
    fields = [f for f in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward") if content.get(f) is not None]
    if version == "2":
        # Accelerate does not read it there, so accept it only if it agrees with the field that is read.
        field, given = "fsdp_config.fsdp_sharding_strategy", content.get("fsdp_sharding_strategy")
        done = level or "parameters"
        if {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients"}.get(str(given).upper()) == done:
            reading.meet(field, given, "with fsdp_version 2 it is fsdp_reshard_after_forward that says so")
        elif given is not None:
            reading.problems.append(
                f"{field} is {shown(given)}, but with fsdp_version 2 Accelerate reads fsdp_reshard_after_forward "
                f"alone, and shards {done}: remove it, or set fsdp_version: 1"
            )
        return
    found = {field: _read_strategy(reading, f"fsdp_config.{field}", content[field]) for field in fields}
    if None in found.values() or not fields:
        return
    if len(set(found.values())) > 1:
        both = " and ".join(f"{field} {shown(content[field])}" for field in fields)
        reading.problems.append(f"fsdp_config has {both}, which contradict each other: remove one")
        return
    field, strategy = fields[-1], found[fields[-1]]
    ignored = field == "fsdp_reshard_after_forward" and strategy != "FULL_SHARD"
    note = "Accelerate 1.15 runs FULL_SHARD all the same: it reads fsdp_sharding_strategy" * ignored
    add_fsdp_strategy(reading, f"fsdp_config.{field}", content[field], str(strategy), note)


def _read_strategy(reading: Reading, path: str, value: Any) -> Any:
    if isinstance(value, bool):
        must = f"must be one of {', '.join(STRATEGIES)}: true and false go with fsdp_version 2"
        reading.problems.append(f"{path} is {shown(value)}, but {must}")
        return None
    return reading.read_field(path, Field(words=SHARDING), value)


def add_fsdp_strategy(reading: Reading, field: str, given: Any, strategy: str, note: str = "") -> None:
    """Add the settings of a ``ShardingStrategy`` of FSDP version 1, which stock Lightning has too."""
    others = {"NO_SHARD": "none", **dict.fromkeys(("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"), "gradients")}
    reading.ask("shard", others.get(strategy, "parameters"), field, given, note)
    if "HYBRID" in strategy:
        inside = "sharded inside a node, replicated across nodes"
        reading.ask("mesh", {"replicate": "auto", "shard": "auto"}, field, given, inside)


def _read_wrapping(reading: Reading, content: Mapping[str, Any], names: Any, size: Any) -> None:
    names_path, size_path = "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_min_num_params"
    path, given = "fsdp_config.fsdp_auto_wrap_policy", content.get("fsdp_auto_wrap_policy")
    policy = reading.read_field(path, Field(kind="str", words=POLICIES), given)
    if policy == "classes" and names:
        reading.ask("units", names, names_path, content["fsdp_transformer_layer_cls_to_wrap"])
    elif policy == "classes":
        reading.ask("units", "auto", path, given, "_no_split_modules, or else repeated blocks")
    elif policy == "size" and size != 0:
        reading.ask("units", size or 100_000_000, size_path, size, "the model itself is a unit too")
    elif policy in ("none", "size"):
        reading.ask("units", [], path, given, "the model is one unit")
    elif given is None:
        reading.meet(path, given, "Accelerate's default is NO_WRAP, here units: auto, which changes no number")
    for field, value, owner in ((names_path, names, "classes"), (size_path, size, "size")):
        if value is not None and policy != owner:
            reading.meet(field, value, f"Accelerate does not read it with {shown(given)} either")
