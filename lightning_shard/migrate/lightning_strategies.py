"""Arguments of stock Lightning's strategies, read into the neutral form."""

import re
from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.zero.config.checks import SCALE_KEYS
from lightning_shard.engines.zero.config.reading import read_config
from lightning_shard.migrate import lightning_fields as tables
from lightning_shard.migrate.accelerate import add_fsdp_strategy
from lightning_shard.migrate.deepspeed_json import CAST_NOTE, PRECISION_NOTE, SCALE_NOTE, read_deepspeed, scale_of
from lightning_shard.migrate.neutral import LEVELS, READ_ELSEWHERE, Field, Reading, shown


def read_stock(reading: Reading, kind: str, arguments: Mapping[str, Any], path: str, *, named: bool) -> None:
    """Add to ``reading`` what a stock strategy asks for by its class's name and arguments, and what is wrong.

    ``named``: whether the file has the arguments one by one, below ``path``, and not the strategy's name alone.
    """
    known = tables.FIELDS[kind]
    reading.check_keys(path, arguments, known, kind)
    given = {key: value for key, value in arguments.items() if value is not None}

    def field(name: str) -> str:
        return f"{path}.{name}" if named else path

    for name in [name for name in given if known.get(name, READ_ELSEWHERE) != READ_ELSEWHERE]:
        given[name] = reading.read_field(field(name), known[name], given[name])
    if "timeout" in given:
        _timeout(reading, field("timeout"), given["timeout"])
    if kind in _SPECIAL:
        _SPECIAL[kind](reading, given, field)


def precision_of(kind: str | None, precision: str) -> tuple[str, str]:
    """What a ``precision`` under a stock strategy is here, and a note on the numbers."""
    if precision == "32-true":
        return precision, ""
    if kind == "DeepSpeedStrategy":
        if precision.endswith("-true"):
            became = precision.replace("true", "mixed")
            return became, f"DeepSpeed keeps fp32 masters under {precision} too, which is {became} here"
        return precision, PRECISION_NOTE if precision == "bf16-mixed" else f"{PRECISION_NOTE}; {SCALE_NOTE}"
    if kind == "FSDPStrategy" and precision.endswith("mixed"):
        bits = precision.removesuffix("-mixed").replace("16", "fp16").replace("bffp16", "bf16")
        return precision, f"gradients are reduced in fp32, by stock FSDP in {bits}: ShardPrecision(reduce: {bits})"
    if kind in ("DDPStrategy", "SingleDeviceStrategy") and precision.endswith("mixed"):
        return precision, CAST_NOTE
    return precision, ""


def _timeout(reading: Reading, field: str, value: Any) -> None:
    """A ``timedelta`` as jsonargparse writes it (``0:30:00``), as a class, or in seconds."""
    units = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
    arguments = value.get("init_args", value) if isinstance(value, Mapping) else {}
    text = re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)", str(value))
    if text:
        parts = zip(text.groups(), units.values(), strict=True)
        reading.ask("timeout_seconds", sum(float(part or 0) * unit for part, unit in parts), field, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        reading.ask("timeout_seconds", float(value), field, value)
    elif arguments and set(arguments) <= set(units):
        reading.ask("timeout_seconds", sum(units[key] * number for key, number in arguments.items()), field, value)
    else:
        reading.problems.append(f"{field} is {shown(value)!r}, but must be a duration such as 0:30:00")


def _ddp(reading: Reading, given: Mapping[str, Any], field: Any) -> None:
    if hook := given.get("ddp_comm_hook"):
        name = str(hook).rpartition(".")[2]
        known = name in ("fp16_compress_hook", "bf16_compress_hook")
        reading.ask("comm_hook", name.removesuffix("_hook") if known else hook, field("ddp_comm_hook"), hook)


def _fsdp(reading: Reading, given: Mapping[str, Any], field: Any) -> None:
    name = "sharding_strategy"
    strategy = reading.read_field(field(name), Field(words=tables.SHARDING), given.get(name, "FULL_SHARD"))
    if strategy is not None:
        add_fsdp_strategy(reading, field(name), given.get(name), strategy)
        if "device_mesh" in given:
            _device_mesh(reading, field("device_mesh"), given["device_mesh"], strategy)
    offload = given.get("cpu_offload")
    if isinstance(offload, Mapping):
        offload = (offload.get("init_args") or offload).get("offload_params")
    reading.read_field(field("cpu_offload"), Field(kind="bool", name="cpu_offload", idle=(False,)), offload)
    for name, setting in (
        ("auto_wrap_policy", "units"),
        ("activation_checkpointing_policy", "activation_checkpointing"),
        ("activation_checkpointing", "activation_checkpointing"),
    ):
        if name in given:
            _policy(reading, field(name), given[name], setting)
    if "activation_checkpointing" in given and "activation_checkpointing_policy" in given:
        reading.problems.append(f"{field('activation_checkpointing')} and its policy are both given: remove one")


def _device_mesh(reading: Reading, field: str, value: Any, strategy: str) -> None:
    if "HYBRID" not in strategy:
        wrong = f"but goes with sharding_strategy HYBRID_SHARD, not with {strategy}"
        reading.problems.append(f"{field} is {shown(value)}, {wrong}")
    elif isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(size, int) for size in value):
        # Before the strategy's own auto, auto.
        reading.asked = [asked for asked in reading.asked if asked.name != "mesh"]
        reading.ask("mesh", {"replicate": value[0], "shard": value[1]}, field, list(value))
    else:
        reading.problems.append(f"{field} is {shown(value)!r}, but must be two numbers: copies, and shards of a copy")


def _policy(reading: Reading, field: str, value: Any, setting: str) -> None:
    """Classes of modules, from their import paths or a ``ModuleWrapPolicy``."""
    if isinstance(value, Mapping):
        inner = value.get("init_args") or {}
        value = inner.get("module_classes", value.get("class_path")) if isinstance(inner, Mapping) else None
    classes = [value] if isinstance(value, str) else value
    if isinstance(classes, list | tuple):
        classes = [item.get("class_path") if isinstance(item, Mapping) else item for item in classes]
    if isinstance(classes, list | tuple) and classes and all(isinstance(name, str) for name in classes):
        names = [name.rpartition(".")[2] for name in classes]
        if all(name[:1].isupper() for name in names):
            reading.ask(setting, names, field, list(classes))
            return
    reading.lose(field, value, "it is a function, which YAML can't carry over", f"{setting}: class names, or a number")


def _model_parallel(reading: Reading, given: Mapping[str, Any], field: Any) -> None:
    reading.ask("shard", "parameters", field("data_parallel_size"), given.get("data_parallel_size"))
    tensor = given.get("tensor_parallel_size", "auto")
    if tensor == 1:
        note = "configure_model finds the ranks in device_mesh['shard'], not in ['data_parallel']"
        reading.meet(field("tensor_parallel_size"), tensor, note)
    else:
        reason = "the mesh has no tensor-parallel axis" + ", which auto is over a node's devices" * (tensor == "auto")
        near = "shard_fsdp over all devices; or parallelize_module in configure_model over a mesh of one's own"
        reading.lose(field("tensor_parallel_size"), tensor, reason, near)


def _deepspeed(reading: Reading, given: Mapping[str, Any], field: Any) -> None:
    config = given.get("config")
    if config is not None:
        beside = [name for name in given if name in _BY_CONFIG]
        if beside:
            fields = ", ".join(map(field, beside))
            reading.problems.append(
                f"{fields} beside config, where Lightning does not read them: remove them, or config"
            )
        read_deepspeed(reading, read_config(config, field("config")), "config: ", clips=False)
        return
    stage = given.get("stage", 2)
    if given.get("zero_optimization") is False:
        reading.ask("shard", "none", field("zero_optimization"), False)
    elif isinstance(stage, int) and stage in range(4):
        reading.ask("shard", LEVELS[stage], field("stage"), given.get("stage"), "" if "stage" in given else "default 2")
    else:
        reading.problems.append(f"{field('stage')} is {shown(stage)!r}, but must be 0, 1, 2 or 3")
    pin, default = given.get("pin_memory"), "/local_nvme"
    for group, device in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_parameters", "offload_params_device"),
    ):
        if given.get(group) is True:
            where = given.get(device, "cpu")
            reading.ask(f"{group}.device", where, field(group), where)
            if where == "nvme":
                reading.ask(f"{group}.nvme_path", given.get("nvme_path", default), field("nvme_path"), default)
            if pin is not None:
                reading.ask(f"{group}.pin_memory", pin, field("pin_memory"), pin)
    scale = {name: given[name] for name in SCALE_KEYS if given.get(name) is not None}
    if scale.pop("loss_scale", 0):
        near = "initial_scale_power, to begin at such a scale"
        reading.lose(field("loss_scale"), given["loss_scale"], "the loss scale is dynamic", near)
    if scale:
        reading.ask("loss_scale", scale_of(scale), field("loss_scale"), scale, "in powers of two")


_BY_CONFIG = {*tables.DEEPSPEED} - {
    "config", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout", "logging_level", "load_full_weights", "exclude_frozen_parameters", *SCALE_KEYS,
}  # fmt: skip
"""What Lightning builds a configuration from where none is given (``DeepSpeedStrategy._create_default_config``)."""

_SPECIAL = {
    "DDPStrategy": _ddp,
    "FSDPStrategy": _fsdp,
    "ModelParallelStrategy": _model_parallel,
    "DeepSpeedStrategy": _deepspeed,
}
