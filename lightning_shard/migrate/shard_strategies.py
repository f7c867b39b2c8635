"""Arguments of this package's own strategies, read into the neutral form by the table of counterparts itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_shard.migrate.counterparts import TABLE, Same
from lightning_shard.migrate.deepspeed_json import add_hpz, read_deepspeed
from lightning_shard.migrate.neutral import (
    LEVELS,
    READ_ELSEWHERE,
    Engine,
    Field,
    Reading,
    check_keys,
    content_of,
    read_fields,
    setting,
    shown,
)

OWN_ENGINES: Mapping[str, Engine] = {
    "ShardDDPStrategy": "ddp",
    "ShardFSDPStrategy": "fsdp",
    "ShardDeepSpeedStrategy": "deepspeed",
}

_SYNC = {"accumulate_sync": setting("accumulate_sync", "str", "auto")}
_MESH = {"mesh.replicate": READ_ELSEWHERE, "mesh.shard": READ_ELSEWHERE}

SPECIAL: Mapping[Engine, Mapping[str, Field]] = {
    "ddp": _SYNC,
    "fsdp": {**_SYNC, **_MESH, "reshard_after_forward": READ_ELSEWHERE, "cpu_offload": setting("cpu_offload", "bool")},
    "deepspeed": {
        **_SYNC,
        **_MESH,
        "config": READ_ELSEWHERE,
        "stage": setting("shard", "int", words=dict(enumerate(LEVELS))),
        "offload_optimizer.device": setting("offload_optimizer.device", "str"),
        "offload_parameters.device": setting("offload_parameters.device", "str"),
        "zero_plus_plus.hpz_partition_size": READ_ELSEWHERE,
        "communication_data_type": setting("reduce", "str"),
    },
}
"""Arguments that are not in the table of counterparts under their own name."""


def arguments_of(engine: Engine) -> dict[str, Field]:
    """Every argument of an engine's strategy, groups with dots."""
    fields = {
        name: setting(name, row.kind)
        for name, row in TABLE.items()
        if isinstance(getattr(row, engine)[0], Same) and not name.startswith("trainer.")
    }
    return {**fields, **SPECIAL[engine]}


def read_own(reading: Reading, engine: Engine, arguments: Mapping[str, Any], path: str) -> None:
    """Add to ``reading`` what arguments of an own strategy ask for."""
    known = arguments_of(engine)
    flat = _flat(arguments, {name.partition(".")[0] for name in known if "." in name})
    check_keys(reading, path, flat, known, "the strategy")
    if flat.get("config") is not None:
        read_deepspeed(reading, content_of(flat["config"], f"{path}.config"), "config: ", stage=2, clips=False)
    read_fields(reading, path, known, flat)
    if "mesh.replicate" in flat or "mesh.shard" in flat:
        mesh = {"replicate": flat.get("mesh.replicate", 1), "shard": flat.get("mesh.shard", "auto")}
        reading.ask("mesh", mesh, f"{path}.mesh", mesh)
    if flat.get("zero_plus_plus.hpz_partition_size") is not None:
        field = f"{path}.zero_plus_plus.hpz_partition_size"
        add_hpz(reading, field, flat["zero_plus_plus.hpz_partition_size"])
    if engine == "fsdp":
        _reshard(reading, flat.get("reshard_after_forward"), f"{path}.reshard_after_forward")
    elif engine == "deepspeed" and flat.get("stage") is None and flat.get("config") is None:
        reading.ask("shard", "gradients", f"{path}.stage", None, "the default is 2")


def _reshard(reading: Reading, given: Any, field: str) -> None:
    if isinstance(given, bool) or given is None:
        reading.ask("shard", "gradients" if given is False else "parameters", field, given)
    elif isinstance(given, int):
        reading.ask("shard", "parameters", field, given)
        reading.ask("reshard_ranks", given, field, given)
    else:
        reading.problems.append(f"{field} is {shown(given)!r}, but must be true, false or a number of ranks")


def _flat(arguments: Mapping[str, Any], groups: set[str]) -> dict[str, Any]:
    """Groups of arguments as keys with dots; not those of ``config`` and ``preemption``."""
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        if key in groups and isinstance(value, Mapping):
            # An empty mapping is a group with its defaults, such as offload to the host.
            value = {**({"device": "cpu"} if key.startswith("offload_") else {}), **value}
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if value is not None}
