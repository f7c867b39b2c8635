"""Read the ``fsdp_config`` of Accelerate and transformers, of both FSDP versions, into neutral settings."""

from collections.abc import Mapping
from typing import Any

from lightning_shard.migrate.neutral import Field, Reading, described, plain, shown

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of FSDP version 1's strategies. Files may also have their numbers in this list, from 1."""

SHARDING: Mapping[Any, str] = {
    **dict(enumerate(STRATEGIES, 1)),
    **{name: name for name in STRATEGIES},
    "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2",
}
"""Their spellings. The last one is torch's, in stock Lightning."""

FSDP = described("fsdp_config")
FSDP_2 = {**FSDP, **described("fsdp_config_2")}


def read_fsdp(reading: Reading, section: Mapping[str, Any]) -> None:
    content = reading.prefixed("fsdp_config", section, "fsdp_", FSDP)
    version = str(content.get("fsdp_version", 1))
    if version not in ("1", "2"):
        reading.problems.append(f"fsdp_config.fsdp_version is {version!r}, but must be 1 or 2")
    reading.meet("fsdp_config.fsdp_version", version, "the engine is FSDP2 always")
    checkpoints = "fsdp_activation_checkpointing"
    if plain(content.get(offloads := f"{checkpoints}_offload")) is True:
        # Accelerate reads it only with activation checkpointing.
        both = plain(content.get(checkpoints)) is True
        met = checkpoints if both else offloads
        reading.meet(f"fsdp_config.{met}", True, "offload includes it" if both else "nothing is checkpointed")
        content = {name: value for name, value in content.items() if name != met}
    read = reading.read_fields("fsdp_config", FSDP_2 if version == "2" else FSDP, content)
    if version == "2":
        _check_sharding_2(reading, content, read["fsdp_reshard_after_forward"] or "parameters")
    else:
        _read_sharding_1(reading, content)
    _read_wrapping(reading, content, read["fsdp_transformer_layer_cls_to_wrap"])


def _check_sharding_2(reading: Reading, content: Mapping[str, Any], level: str) -> None:
    """Accept version 1's field, which Accelerate does not read with version 2, only if it agrees with ``level``."""
    field, given = "fsdp_config.fsdp_sharding_strategy", content.get("fsdp_sharding_strategy")
    if {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients"}.get(str(given).upper()) == level:
        reading.meet(field, given, "with fsdp_version 2 it is fsdp_reshard_after_forward that says so")
    elif given is not None:
        reading.problems.append(
            f"{field} is {shown(given)}, but with fsdp_version 2 Accelerate reads fsdp_reshard_after_forward "
            f"alone, and shards {level}: remove it, or set fsdp_version: 1"
        )


def _read_sharding_1(reading: Reading, content: Mapping[str, Any]) -> None:
    names = [f for f in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward") if content.get(f) is not None]
    for name in names:
        field, given = f"fsdp_config.{name}", content[name]
        if isinstance(given, bool):
            reading.problems.append(f"{field} is {shown(given)}, but true and false go with fsdp_version 2")
        elif strategy := reading.read_field(field, Field(words=SHARDING), given):
            ignored = name == "fsdp_reshard_after_forward" and strategy != "FULL_SHARD"
            note = "Accelerate 1.15 runs FULL_SHARD all the same: it reads fsdp_sharding_strategy" * ignored
            add_fsdp_strategy(reading, field, given, strategy, note)


def add_fsdp_strategy(reading: Reading, field: str, given: Any, strategy: str, note: str = "") -> None:
    """Add the settings of a ``ShardingStrategy`` of FSDP version 1, which stock Lightning has too."""
    others = {"NO_SHARD": "none", **dict.fromkeys(("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"), "gradients")}
    reading.ask("shard", others.get(strategy, "parameters"), field, given, note)
    if "HYBRID" in strategy:
        inside = "sharded inside a node, replicated across nodes"
        reading.ask("mesh", {"replicate": "auto", "shard": "auto"}, field, given, inside)


def _read_wrapping(reading: Reading, content: Mapping[str, Any], names: Any) -> None:
    path, given = "fsdp_config.fsdp_auto_wrap_policy", content.get("fsdp_auto_wrap_policy")
    size = plain(content.get("fsdp_min_num_params"))
    policies: dict[str, Any] = {"TRANSFORMER_BASED_WRAP": names or "auto", "NO_WRAP": []}
    policies["SIZE_BASED_WRAP"] = [] if size == 0 else size or 100_000_000
    described = Field(name="units", words=policies, note="by the two fields for class names and for a size")
    reading.read_field(path, described, given)
    if given is None:
        reading.meet(path, given, "Accelerate's default is NO_WRAP, here units: auto, which changes no number")
