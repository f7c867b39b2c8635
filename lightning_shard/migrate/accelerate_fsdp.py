"""The FSDP sections of Accelerate config files, versions 1 and 2, and the mesh of version 2."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from lightning_shard.migrate import accelerate_fields as tables
from lightning_shard.migrate.fields import Field, check_keys, read_field, read_fields, satisfied, setting
from lightning_shard.migrate.neutral import Reading, shown


def with_prefix(section: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as they are since Accelerate 0.20, as its own launcher makes them."""
    named = {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in section.items()}
    return {tables.OLD_FSDP.get(key, key): value for key, value in named.items()}


def read_fsdp(reading: Reading, section: Mapping[str, Any]) -> None:
    """Add to ``reading`` what an ``fsdp_config`` of either version asks for."""
    content = with_prefix(section)
    known = {key for name in (*tables.FSDP, *tables.OLD_FSDP) for key in (name, name.removeprefix("fsdp_"))}
    check_keys(reading, "fsdp_config", section, known, "fsdp_config")
    version = str(content.get("fsdp_version", 1))
    if version not in ("1", "2"):
        reading.problems.append(f"fsdp_config.fsdp_version is {version!r}, but must be 1 or 2")
    else:
        reading.meet("fsdp_config.fsdp_version", int(version), "the engine is FSDP2 always")
    read_fields(reading, "fsdp_config", tables.FSDP, content)
    _sharding(reading, content, version)
    _wrapping(reading, content)
    _loading(reading, content, version)


def _sharding(reading: Reading, content: Mapping[str, Any], version: str) -> None:
    fields = [f for f in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward") if content.get(f) is not None]
    if version == "2":
        described = setting("shard", "bool", words={True: "parameters", False: "gradients"})
        field = "fsdp_reshard_after_forward"
        read_field(reading, f"fsdp_config.{field}", described, content.get(field))
        if "fsdp_sharding_strategy" in fields:
            reading.problems.append(
                f"fsdp_config.fsdp_sharding_strategy is {shown(content['fsdp_sharding_strategy'])}, but fsdp_version "
                "is 2, where Accelerate reads fsdp_reshard_after_forward alone: remove it, or set fsdp_version: 1"
            )
        return
    found = {field: _strategy(reading, field, content[field]) for field in fields}
    if None in found.values():
        return
    if len(set(found.values())) > 1:
        both = " and ".join(f"{field} {shown(content[field])}" for field in fields)
        reading.problems.append(f"fsdp_config has {both}, which contradict each other: remove one")
        return
    for field, strategy in list(found.items())[-1:]:
        assert strategy is not None
        ignored = field == "fsdp_reshard_after_forward" and strategy != "FULL_SHARD"
        note = "Accelerate 1.15 runs FULL_SHARD all the same: it reads fsdp_sharding_strategy" if ignored else ""
        add_fsdp_strategy(reading, f"fsdp_config.{field}", content[field], strategy, note)


def _strategy(reading: Reading, field: str, value: Any) -> str | None:
    words: dict[Any, str] = {**dict(enumerate(tables.STRATEGIES, 1)), **{name: name for name in tables.STRATEGIES}}
    probe = Reading()
    if isinstance(value, bool):
        expected = "one of " + ", ".join(tables.STRATEGIES)
        probe.problems.append(
            f"fsdp_config.{field} is {shown(value)}, but must be {expected}: true and false go with fsdp_version 2"
        )
    else:
        read_field(probe, f"fsdp_config.{field}", Field(kind="word", name="shard", words=words), value)
    reading.problems += probe.problems
    return str(probe.asked[0].value) if probe.asked else None


def add_fsdp_strategy(reading: Reading, field: str, given: Any, strategy: str, note: str = "") -> None:
    """Add what a ``ShardingStrategy`` of FSDP version 1 is here; stock Lightning has the same names."""
    level = {"SHARD_GRAD_OP": "gradients", "HYBRID_SHARD_ZERO2": "gradients", "_HYBRID_SHARD_ZERO2": "gradients"}
    reading.ask("shard", "none" if strategy == "NO_SHARD" else level.get(strategy, "parameters"), field, given, note)
    if strategy.lstrip("_").startswith("HYBRID"):
        reading.ask(
            "mesh",
            {"replicate": "auto", "shard": "auto"},
            field,
            given,
            "sharded inside a node, replicated across nodes",
        )


def _wrapping(reading: Reading, content: Mapping[str, Any]) -> None:
    names_field, size_field = "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"
    names = read_field(reading, f"fsdp_config.{names_field}", Field(kind="names"), content.get(names_field) or None)
    size = read_field(reading, f"fsdp_config.{size_field}", Field(kind="count"), content.get(size_field))
    given = content.get("fsdp_auto_wrap_policy")
    path = "fsdp_config.fsdp_auto_wrap_policy"
    probe = Reading()
    read_field(probe, path, Field(kind="str", name="units", words=tables.POLICIES), given)
    reading.problems += probe.problems
    policy = probe.value("units")
    if policy == "classes" and names:
        reading.ask("units", names, f"fsdp_config.{names_field}", content[names_field])
    elif policy == "classes":
        reading.ask("units", "auto", path, given, "_no_split_modules, and repeated blocks where there are none")
    elif policy == "size" and size != 0:
        reading.ask("units", size or 100_000_000, f"fsdp_config.{size_field}", size, "the model itself is a unit too")
    elif policy in ("none", "size"):
        reading.ask("units", [], path, given, "the model is one unit")
    elif not probe.problems:
        reading.meet(path, given, "Accelerate's default is NO_WRAP; here units: auto, which changes no number")
    for field, value, owner in ((names_field, names, "classes"), (size_field, size, "size")):
        if value is not None and policy != owner:
            reading.meet(f"fsdp_config.{field}", value, f"Accelerate does not read it with {shown(given)} either")


def _loading(reading: Reading, content: Mapping[str, Any], version: str) -> None:
    loading, sync = "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"
    meta = "build the model in configure_model, on the meta device; load_pretrained reads each process's slices alone"
    loads = read_field(reading, f"fsdp_config.{loading}", satisfied(meta, "bool", False), content.get(loading))
    broadcast = satisfied("rank 0's values go to all ranks always", "bool")
    synced = read_field(reading, f"fsdp_config.{sync}", broadcast, content.get(sync))
    if loads and synced is False:
        reading.problems.append(
            f"fsdp_config.{loading} is true with {sync} false, but the others then have no values; Accelerate refuses "
            "it too"
        )
    prefetch = "fsdp_forward_prefetch"
    wanted = setting("forward_prefetch", "bool", False, words={True: 1})
    if version == "2":
        wanted = satisfied("Accelerate does not read it with fsdp_version 2 either", "bool", False)
    read_field(reading, f"fsdp_config.{prefetch}", wanted, content.get(prefetch))


def read_mesh(reading: Reading, section: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Add the mesh that a ``parallelism_config`` asks for; ``content``: of the file."""
    prefix = "parallelism_config_"
    plain = {str(key).removeprefix(prefix): value for key, value in section.items()}
    known = {key for name in tables.PARALLELISM for key in (name, prefix + name)}
    check_keys(reading, "parallelism_config", section, known, "parallelism_config")
    sizes: dict[str, int] = {}
    for name, described in tables.PARALLELISM.items():
        described = Field(kind="int") if name.startswith("dp_") else described
        value = read_field(reading, f"parallelism_config.{name}", described, plain.get(name))
        if name.endswith("_size") and value is not None:
            sizes[name] = value
    if not sizes:
        return
    replicate, shard = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    others = prod(sizes.get(name, 1) for name in ("tp_size", "cp_size", "sp_size"))
    product = replicate * shard * others
    processes = content.get("num_processes")
    if isinstance(processes, int) and processes > 0 and product != processes:
        factors = " x ".join(f"{name} {size}" for name, size in sizes.items())
        reading.problems.append(
            f"parallelism_config: {factors} is {product}, but num_processes is {processes}; they must be equal"
        )
    given = {name: size for name, size in sizes.items() if name.startswith("dp_")}
    reading.ask(
        "mesh", {"replicate": replicate, "shard": shard if others == 1 else "auto"}, "parallelism_config", given
    )
