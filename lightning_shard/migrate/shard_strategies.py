"""Arguments of this package's own strategies, read into the neutral form by the table of counterparts itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_shard.migrate.counterparts import TABLE, Same
from lightning_shard.migrate.deepspeed_json import add_hpz, read_deepspeed
from lightning_shard.migrate.fields import Field, check_keys, read_field
from lightning_shard.migrate.files import read_file
from lightning_shard.migrate.neutral import LEVELS, Engine, Reading, shown

OWN_ENGINES: Mapping[str, Engine] = {
    "ShardDDPStrategy": "ddp",
    "ShardFSDPStrategy": "fsdp",
    "ShardDeepSpeedStrategy": "deepspeed",
}

_MESH = {"mesh.replicate": Field(), "mesh.shard": Field()}
_SYNC = {"accumulate_sync": Field(kind="str", name="accumulate_sync", idle=("auto",))}

SPECIAL: Mapping[Engine, Mapping[str, Field]] = {
    "ddp": _SYNC,
    "fsdp": {**_SYNC, **_MESH, "reshard_after_forward": Field(), "cpu_offload": Field(kind="bool", name="cpu_offload")},
    "deepspeed": {
        **_SYNC,
        **_MESH,
        "config": Field(),
        "stage": Field(kind="int", name="shard", words=dict(enumerate(LEVELS))),
        "offload_optimizer.device": Field(kind="str", name="offload_optimizer.device"),
        "offload_parameters.device": Field(kind="str", name="offload_parameters.device"),
        "zero_plus_plus.hpz_partition_size": Field(),
        "communication_data_type": Field(kind="str", name="reduce"),
    },
}
"""Arguments that are not in the table of counterparts under their own name."""


def arguments_of(engine: Engine) -> dict[str, Field]:
    """Every argument of an engine's strategy, groups with dots."""
    fields = {
        name: Field(kind=row.kind, name=name)
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
        config = flat["config"]
        content = read_file(Path(config)) if isinstance(config, str) else config
        read_deepspeed(reading, content, "config: ")
    for name, described in known.items():
        value = flat.get(name)
        if value is not None and described != Field():
            read_field(reading, f"{path}.{name}", described, value)
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
    """Groups of arguments as keys with dots; a ``config`` and ``preemption`` stay whole."""
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        if key in groups and isinstance(value, Mapping):
            # An empty mapping is a group with its defaults, such as offload to the host.
            value = {**({"device": "cpu"} if key.startswith("offload_") else {}), **value}
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if value is not None}
