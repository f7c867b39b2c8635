"""Read arguments of Lightning 2.6's strategies (``lightning/pytorch/strategies``) into neutral settings."""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from lightning_shard.engines.zero.config.reading import read_config
from lightning_shard.engines.zero.config.zero_settings import SCALE_KEYS
from lightning_shard.migrate import neutral
from lightning_shard.migrate.deepspeed_json import CAST_NOTE, PRECISION_NOTE, SCALE_NOTE, read_deepspeed, scale_of
from lightning_shard.migrate.fsdp_config import SHARDING, add_fsdp_strategy
from lightning_shard.migrate.neutral import READ_ELSEWHERE, Field, Reading, described, plain, rows, shown

_COMMON = described("Strategy")
STRATEGIES: Mapping[str, tuple[neutral.Engine, Mapping[str, Field]]] = {
    "DDPStrategy": ("ddp", _COMMON | described("DDPStrategy")),
    "SingleDeviceStrategy": ("ddp", described("SingleDeviceStrategy")),
    "FSDPStrategy": ("fsdp", _COMMON | described("FSDPStrategy")),
    "ModelParallelStrategy": ("fsdp", described("ModelParallelStrategy")),
    "DeepSpeedStrategy": ("deepspeed", _COMMON | described("DeepSpeedStrategy")),
}
"""Class to its engine and its arguments."""

_CALLED: Mapping[str, str] = dict(rows("called"))
"""Arguments that are `READ_ELSEWHERE`, to their names here."""


def called_here(argument: str) -> str:
    """Say an argument's name here, or that there is none. ``""``: no stock strategy has the argument."""
    found = next((table[argument] for _, table in STRATEGIES.values() if argument in table), None)
    if found is None:
        return ""
    called = _CALLED.get(argument) or found.name or found.nearest
    return " It is stock Lightning's." + (f" Use {called}." if called else " Remove it.")


def read_stock(reading: Reading, kind: str, arguments: Mapping[str, Any], path: str, *, named: bool) -> None:
    """Read a stock strategy. ``named``: its arguments are below ``path``, else they come from its name."""
    _, known = STRATEGIES[kind]
    reading.check_keys(path, arguments, known, kind)
    given = {key: value for key, value in arguments.items() if value is not None}

    def field(name: str) -> str:
        return f"{path}.{name}" if named else path

    for name in [name for name in given if known.get(name, READ_ELSEWHERE) != READ_ELSEWHERE]:
        given[name] = reading.read_field(field(name), known[name], given[name])
    if "timeout" in given:
        _read_timeout(reading, field("timeout"), given["timeout"])
    if hook := given.get("ddp_comm_hook"):
        name = str(hook).rpartition(".")[2]
        known_here = name in ("fp16_compress_hook", "bf16_compress_hook")
        reading.ask("comm_hook", name.removesuffix("_hook") if known_here else hook, field("ddp_comm_hook"), hook)
    if kind in _SPECIAL:
        _SPECIAL[kind](reading, given, field)


def precision_of(kind: str | None, precision: str) -> tuple[str, str]:
    """Return this package's ``precision`` for one under a stock strategy, and a note on the numbers."""
    bits, _, form = precision.partition("-")
    if kind == "DeepSpeedStrategy" and form == "true" and bits != "32":
        return f"{bits}-mixed", f"DeepSpeed keeps fp32 masters under {precision} too, which is {bits}-mixed here"
    reduced = "bf16" if bits == "bf16" else "fp16"
    notes = {
        "DeepSpeedStrategy": PRECISION_NOTE if bits == "bf16" else f"{PRECISION_NOTE}; {SCALE_NOTE}",
        "FSDPStrategy": f"gradients are reduced in fp32, by stock FSDP in {reduced}: ShardPrecision(reduce: {reduced})",
    }
    note = notes.get(str(kind), CAST_NOTE if kind in STRATEGIES else "")
    return precision, note if form == "mixed" else ""


def _read_timeout(reading: Reading, field: str, value: Any) -> None:
    """Read a ``timedelta``, as jsonargparse writes it (``0:30:00``), as a class, or in seconds."""
    arguments = value.get("init_args", value) if isinstance(value, Mapping) else {"seconds": value}
    if text := re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)", str(value)):
        names = ("days", "hours", "minutes", "seconds")
        arguments = {name: float(part or 0) for name, part in zip(names, text.groups(), strict=True)}
    try:
        reading.ask("timeout_seconds", timedelta(**arguments).total_seconds(), field, value)
    except TypeError:
        reading.problems.append(f"{field} is {shown(value)!r}, but must be a duration such as 0:30:00")


def _read_fsdp_strategy(reading: Reading, given: Mapping[str, Any], field: Callable[[str], str]) -> None:
    name = "sharding_strategy"
    strategy = reading.read_field(field(name), Field(words=SHARDING), given.get(name, "FULL_SHARD"))
    if strategy is not None:
        add_fsdp_strategy(reading, field(name), given.get(name), strategy)
    if mesh := given.get("device_mesh"):
        is_pair = isinstance(mesh, list | tuple) and len(mesh) == 2
        if not is_pair or "HYBRID" not in str(strategy):
            rule = "must be two numbers, copies and shards of a copy, and goes with sharding_strategy HYBRID_SHARD"
            reading.problems.append(f"{field('device_mesh')} is {shown(mesh)}, but {rule}")
        else:
            # It replaces the mesh auto, auto of the strategy's name.
            reading.asked = [asked for asked in reading.asked if asked.name != "mesh"]
            reading.ask("mesh", {"replicate": mesh[0], "shard": mesh[1]}, field("device_mesh"), list(mesh))
    offload = given.get("cpu_offload")
    if isinstance(offload, Mapping):
        offload = (offload.get("init_args") or offload).get("offload_params")
    reading.read_field(field("cpu_offload"), Field(name="cpu_offload", idle=(False,)), offload)
    for name in ("auto_wrap_policy", "activation_checkpointing_policy", "activation_checkpointing"):
        if name in given:
            _read_policy(reading, field(name), given[name], "units" if "wrap" in name else "activation_checkpointing")


def _read_policy(reading: Reading, field: str, value: Any, setting: str) -> None:
    """Read classes of modules from their import paths or a ``ModuleWrapPolicy``."""
    if isinstance(value, Mapping):
        inner = value.get("init_args") or {}
        value = inner.get("module_classes", value.get("class_path"))
    given = value if isinstance(value, list | tuple) else [value]
    classes = [item.get("class_path") if isinstance(item, Mapping) else item for item in given]
    names = [str(name).rpartition(".")[2] for name in classes]
    if names and all(name[:1].isupper() for name in names):
        reading.ask(setting, names, field, classes)
    else:
        near = f"{setting}: class names, or a number"
        reading.lose(field, value, "it is a function, which YAML can't carry over", near)


def _read_model_parallel(reading: Reading, given: Mapping[str, Any], field: Callable[[str], str]) -> None:
    reading.ask("shard", "parameters", field("data_parallel_size"), given.get("data_parallel_size"))
    tensor = given.get("tensor_parallel_size", "auto")
    if tensor == 1:
        note = "configure_model finds the ranks in device_mesh['shard'], not in ['data_parallel']"
        reading.meet(field("tensor_parallel_size"), tensor, note)
    else:
        reason = "the mesh has no tensor-parallel axis" + ", which auto is over a node's devices" * (tensor == "auto")
        near = "shard_fsdp over all devices, or parallelize_module in configure_model over your own mesh"
        reading.lose(field("tensor_parallel_size"), tensor, reason, near)


def _read_deepspeed_strategy(reading: Reading, given: Mapping[str, Any], field: Callable[[str], str]) -> None:
    if (config := given.get("config")) is not None:
        if fields := ", ".join(field(name) for name in given if name in _BY_CONFIG):
            wrong = "given with config, so Lightning does not read them: remove them, or config"
            reading.problems.append(f"{fields}: {wrong}")
        read_deepspeed(reading, read_config(config, field("config")), "config: ", clips=False)
        return
    if reading.value("shard") is None:
        reading.ask("shard", "gradients", field("stage"), None, "default 2")
    pin, default = given.get("pin_memory"), "/local_nvme"
    for group in ("offload_optimizer", "offload_parameters"):
        if given.get(group) is True:
            device = given.get(f"{group.replace('parameters', 'params')}_device", "cpu")
            reading.ask(f"{group}.device", device, field(group), device)
            if device == "nvme":
                reading.ask(f"{group}.nvme_path", given.get("nvme_path", default), field("nvme_path"), default)
            if pin is not None:
                reading.ask(f"{group}.pin_memory", pin, field("pin_memory"), pin)
    scale = {name: plain(given[name]) for name in SCALE_KEYS if name in given}
    if scale.pop("loss_scale", 0):
        near = "initial_scale_power, to begin at such a scale"
        reading.lose(field("loss_scale"), given["loss_scale"], "the loss scale is dynamic", near)
    for name in [name for name, value in scale.items() if not isinstance(value, int | float)]:
        reading.problems.append(f"{field(name)} is {scale.pop(name)!r}, but must be a number")
    if scale:
        reading.ask("loss_scale", scale_of(scale), field("loss_scale"), scale, "in powers of two")


_BY_CONFIG = {*STRATEGIES["DeepSpeedStrategy"][1]} - {
    "config", "logging_level", "load_full_weights", "exclude_frozen_parameters", *_COMMON, *SCALE_KEYS
}  # fmt: skip
"""Arguments that Lightning reads only without ``config`` (``DeepSpeedStrategy._create_default_config``)."""

_SPECIAL = {
    "FSDPStrategy": _read_fsdp_strategy,
    "ModelParallelStrategy": _read_model_parallel,
    "DeepSpeedStrategy": _read_deepspeed_strategy,
}
