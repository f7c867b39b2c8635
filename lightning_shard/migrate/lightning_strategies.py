"""Arguments of the strategies in ``lightning/pytorch/strategies`` of Lightning 2.6, read into the neutral form."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning_shard.engines.zero.config.reading import read_config
from lightning_shard.engines.zero.config.settings import SCALE_KEYS
from lightning_shard.migrate import neutral
from lightning_shard.migrate.deepspeed_json import CAST_NOTE, PRECISION_NOTE, SCALE_NOTE, read_deepspeed, scale_of
from lightning_shard.migrate.fsdp_config import add_fsdp_strategy, backward_prefetch
from lightning_shard.migrate.neutral import READ_ELSEWHERE, Field, Reading, each, satisfied, setting, shown, unsupported

_DEVICES = unsupported("the Trainer's", "trainer.devices")
_COMMON: Mapping[str, Field] = {
    "accelerator": unsupported("the Trainer's", "trainer.accelerator"),
    "parallel_devices": _DEVICES,
    "cluster_environment": unsupported("the Trainer's", "trainer.plugins"),
    "checkpoint_io": unsupported("checkpoints are this package's own, which every engine reads"),
    "precision_plugin": unsupported("strategies take none", "trainer.precision, or ShardPrecision"),
    "process_group_backend": setting("process_group_backend", "str"),
    "timeout": READ_ELSEWHERE,
}

_PYTHON = "it is a function or an object, which YAML can't carry over"

DDP: Mapping[str, Field] = {
    **_COMMON,
    "ddp_comm_state": setting("comm_state", "any"),
    "ddp_comm_hook": READ_ELSEWHERE,
    "ddp_comm_wrapper": unsupported("hooks are not wrapped", "comm_hook: fp16_compress or bf16_compress"),
    "model_averaging_period": unsupported("models are averaged in every step"),
    "start_method": setting("start_method", "str", words={n: n for n in ("popen", "spawn", "fork", "forkserver")}),
    **{
        name: setting(name, "bool", name == "broadcast_buffers")
        for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
    },
    "bucket_cap_mb": setting("bucket_cap_mb", "float"),
    "check_reduction": setting("", "bool", False, True),
    **each(
        unsupported("only torch's own DistributedDataParallel has it", "", "any", False, 0),
        "device_ids output_device dim process_group skip_all_reduce_unused_params bucket_cap_mb_list batched_grad_copy "
        "forward_sync_buffers",
    ),
    "init_sync": unsupported("rank 0's values go to all ranks always", "", "bool", True),
    **each(unsupported(_PYTHON), "delay_all_reduce_named_params param_to_hook_all_reduce device_mesh"),
    "mixed_precision": _COMMON["precision_plugin"],
}  # fmt: skip

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
SHARDING: Mapping[Any, str] = {**{name: name for name in _STRATEGIES}, **dict(enumerate(_STRATEGIES, 1))}

FSDP: Mapping[str, Field] = {
    **_COMMON,
    **each(
        READ_ELSEWHERE,
        "cpu_offload auto_wrap_policy activation_checkpointing activation_checkpointing_policy sharding_strategy "
        "device_mesh",
    ),
    "mixed_precision": unsupported("the dtypes are the precision's", "ShardPrecision(precision=..., reduce=...)"),
    "state_dict_type": setting("checkpoint_form", "str", words={"FULL": "full", "SHARDED": "portable"}),
    "use_orig_params": satisfied("parameters keep their shapes and names always", "bool"),
    "sync_module_states": satisfied("rank 0's values go to all ranks always", "bool"),
    "limit_all_gathers": satisfied("FSDP2 gathers no more units than are set to be gathered ahead", "bool"),
    "forward_prefetch": setting("forward_prefetch", "bool", False, words={True: 1}),
    "backward_prefetch": backward_prefetch({"BACKWARD_POST": 2, 2: 2}),
    **each(unsupported(_PYTHON, "ignored_modules: [ClassName]"), "ignored_modules ignored_states"),
    "param_init_fn": unsupported(_PYTHON, "reset_parameters in the modules; load_pretrained"),
    "device_id": _DEVICES,
    "process_group": unsupported(_PYTHON, "mesh"),
}  # fmt: skip

MODEL_PARALLEL: Mapping[str, Field] = {
    **each(READ_ELSEWHERE, "data_parallel_size tensor_parallel_size timeout"),
    "save_distributed_checkpoint": setting("checkpoint_form", "bool", words={True: "portable", False: "full"}),
    "process_group_backend": _COMMON["process_group_backend"],
}

SINGLE_DEVICE: Mapping[str, Field] = {
    **{name: _COMMON[name] for name in ("accelerator", "checkpoint_io", "precision_plugin")},
    "device": _DEVICES,
}

DEEPSPEED: Mapping[str, Field] = {
    **{name: described for name, described in _COMMON.items() if name != "checkpoint_io"},
    **each(
        READ_ELSEWHERE,
        "config zero_optimization stage offload_optimizer offload_optimizer_device offload_parameters "
        "offload_params_device nvme_path pin_memory",
    ),
    **dict.fromkeys(SCALE_KEYS, Field(kind="int")),
    **each(Field(kind="float"), "loss_scale min_loss_scale"),
    "remote_device": satisfied(
        "build the model in configure_model, on the meta device: each unit is sharded as it is made", "str"
    ),
    "optimizer_buffer_count": setting("offload_optimizer.buffer_count", "int"),
    "params_buffer_count": setting("offload_parameters.buffer_count", "int"),
    "params_buffer_size": setting("offload_parameters.buffer_size", "int"),
    "max_in_cpu": setting("offload_parameters.max_in_cpu", "int"),
    "sub_group_size": setting("stage3.sub_group_size", "int"),
    "contiguous_gradients": setting("buckets.contiguous_gradients", "bool"),
    "overlap_comm": setting("buckets.overlap_comm", "bool"),
    "reduce_scatter": setting("buckets.reduce_scatter", "bool"),
    "allgather_bucket_size": setting("buckets.allgather", "int"),
    "reduce_bucket_size": setting("buckets.reduce", "int"),
    "allgather_partitions": setting("config.zero_optimization.allgather_partitions", "bool"),
    "block_size": setting("config.aio.block_size", "int", 1048576),
    "queue_depth": setting("config.aio.queue_depth", "int", 8),
    "single_submit": setting("config.aio.single_submit", "bool", False),
    "overlap_events": setting("config.aio.overlap_events", "bool", True),
    "thread_count": setting("config.aio.intra_op_parallelism", "int", 1),
    "zero_allow_untested_optimizer": setting("config.zero_allow_untested_optimizer", "bool", True),
    "logging_batch_size_per_gpu": setting("config.train_micro_batch_size_per_gpu", "int", "auto"),
    "logging_level": unsupported(
        "DeepSpeed's logger is left alone", "logging.getLogger('DeepSpeed')", "any", 30, "WARN", "WARNING",
        effect="speed",
    ),
    **{
        name: setting(f"config.activation_checkpointing.{name}", "bool", False)
        for name in (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
        )
    },
    "load_full_weights": satisfied("ckpt_path reads every form of checkpoint", "bool", False),
    "exclude_frozen_parameters": unsupported(
        "a checkpoint holds every parameter", "`lightning-shard checkpoint export --module NAME`", "bool", False,
        effect="memory",
    ),
}  # fmt: skip

STRATEGIES: Mapping[str, tuple[neutral.Engine, Mapping[str, Field]]] = {
    "DDPStrategy": ("ddp", DDP),
    "SingleDeviceStrategy": ("ddp", SINGLE_DEVICE),
    "FSDPStrategy": ("fsdp", FSDP),
    "ModelParallelStrategy": ("fsdp", MODEL_PARALLEL),
    "DeepSpeedStrategy": ("deepspeed", DEEPSPEED),
}
"""Class to its engine and its arguments."""

_CALLED: Mapping[str, str] = {
    "auto_wrap_policy": "units, with class names or a number of parameters",
    "sharding_strategy": "reshard_after_forward and mesh. FULL_SHARD is shard_fsdp, SHARD_GRAD_OP shard_fsdp_grad_op, "
    "HYBRID_SHARD shard_fsdp_hybrid, NO_SHARD shard_ddp",
    "activation_checkpointing_policy": "activation_checkpointing",
    "device_mesh": "mesh",
    "timeout": "timeout_seconds",
    "ddp_comm_hook": "comm_hook",
    "zero_optimization": "stage",
    "offload_optimizer_device": "offload_optimizer.device",
    "offload_params_device": "offload_parameters.device",
    "nvme_path": "offload_optimizer.nvme_path and offload_parameters.nvme_path",
    "pin_memory": "offload_optimizer.pin_memory and offload_parameters.pin_memory",
    **dict.fromkeys(SCALE_KEYS, "the loss_scale of ShardPrecision"),
    "data_parallel_size": "mesh.shard",
    "tensor_parallel_size": "torch's parallelize_module in configure_model",
    "state_dict_type": 'the name of a checkpoint: ModelCheckpoint(filename="{epoch}.full") writes one stock file',
}
"""What those are called here whose values are read elsewhere."""


def called_here(argument: str) -> str:
    """What an argument of stock Lightning's strategies is called here, or why there is none; ``""`` if unknown."""
    found = next((table[argument] for _, table in STRATEGIES.values() if argument in table), READ_ELSEWHERE)
    if found is READ_ELSEWHERE and argument not in _CALLED:
        return ""
    called = _CALLED.get(argument) or found.name or found.nearest
    reason = f": {found.met or found.reason}" if argument not in _CALLED and not found.name else ""
    return f" It is stock Lightning's{reason}." + (f" Use {called}." if called else " Remove it.")


def read_stock(reading: Reading, kind: str, arguments: Mapping[str, Any], path: str, *, named: bool) -> None:
    """Add to ``reading`` what a stock strategy asks for, and its problems; ``named``: arguments are below ``path``."""
    _, known = STRATEGIES[kind]
    reading.check_keys(path, arguments, known, kind)
    given = {key: value for key, value in arguments.items() if value is not None}

    def field(name: str) -> str:
        return f"{path}.{name}" if named else path

    for name in [name for name in given if known.get(name, READ_ELSEWHERE) != READ_ELSEWHERE]:
        given[name] = reading.read_field(field(name), known[name], given[name])
    if "timeout" in given:
        _timeout(reading, field("timeout"), given["timeout"])
    if hook := given.get("ddp_comm_hook"):
        name = str(hook).rpartition(".")[2]
        known_here = name in ("fp16_compress_hook", "bf16_compress_hook")
        reading.ask("comm_hook", name.removesuffix("_hook") if known_here else hook, field("ddp_comm_hook"), hook)
    if kind in _SPECIAL:
        _SPECIAL[kind](reading, given, field)


def precision_of(kind: str | None, precision: str) -> tuple[str, str]:
    """What a ``precision`` under a stock strategy is here, and a note on the numbers."""
    bits, _, form = precision.partition("-")
    if kind == "DeepSpeedStrategy" and form == "true" and bits != "32":
        return f"{bits}-mixed", f"DeepSpeed keeps fp32 masters under {precision} too, which is {bits}-mixed here"
    reduced = "bf16" if bits == "bf16" else "fp16"
    notes = {
        "DeepSpeedStrategy": PRECISION_NOTE if bits == "bf16" else f"{PRECISION_NOTE}; {SCALE_NOTE}",
        "FSDPStrategy": f"gradients are reduced in fp32, by stock FSDP in {reduced}: ShardPrecision(reduce: {reduced})",
        "DDPStrategy": CAST_NOTE,
        "SingleDeviceStrategy": CAST_NOTE,
    }
    return precision, notes.get(str(kind), "") if form == "mixed" else ""


def _timeout(reading: Reading, field: str, value: Any) -> None:
    """A ``timedelta`` as jsonargparse writes it (``0:30:00``), as a class, or in seconds."""
    arguments = value.get("init_args", value) if isinstance(value, Mapping) else {"seconds": value}
    if text := re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)", str(value)):
        names = ("days", "hours", "minutes", "seconds")
        arguments = {name: float(part or 0) for name, part in zip(names, text.groups(), strict=True)}
    try:
        seconds = 0.0 if isinstance(value, bool) else timedelta(**arguments).total_seconds()
    except TypeError:
        seconds = 0.0
    if seconds > 0:
        reading.ask("timeout_seconds", seconds, field, value)
    else:
        reading.problems.append(f"{field} is {shown(value)!r}, but must be a duration such as 0:30:00")


def _fsdp(reading: Reading, given: Mapping[str, Any], field: Any) -> None:
    name = "sharding_strategy"
    strategy = reading.read_field(field(name), Field(words=SHARDING), given.get(name, "FULL_SHARD"))
    if strategy is not None:
        add_fsdp_strategy(reading, field(name), given.get(name), strategy)
        if "device_mesh" in given:
            _device_mesh(reading, field("device_mesh"), given["device_mesh"], strategy)
    offload = given.get("cpu_offload")
    if isinstance(offload, Mapping):
        offload = (offload.get("init_args") or offload).get("offload_params")
    reading.read_field(field("cpu_offload"), Field(kind="bool", name="cpu_offload", idle=(False,)), offload)
    for name in ("auto_wrap_policy", "activation_checkpointing_policy", "activation_checkpointing"):
        if name in given:
            _policy(reading, field(name), given[name], "units" if "wrap" in name else "activation_checkpointing")
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
    given = value if isinstance(value, list | tuple) else [value]
    classes = [item.get("class_path") if isinstance(item, Mapping) else item for item in given]
    names = [name.rpartition(".")[2] if isinstance(name, str) else "" for name in classes]
    if names and all(name[:1].isupper() for name in names):
        reading.ask(setting, names, field, classes)
    else:
        near = f"{setting}: class names, or a number"
        reading.lose(field, value, "it is a function, which YAML can't carry over", near)


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
        if fields := ", ".join(field(name) for name in given if name in _BY_CONFIG):
            wrong = "beside config, where Lightning does not read them: remove them, or config"
            reading.problems.append(f"{fields} {wrong}")
        read_deepspeed(reading, read_config(config, field("config")), "config: ", clips=False)
        return
    stage = given.get("stage", 2)
    if given.get("zero_optimization") is False:
        reading.ask("shard", "none", field("zero_optimization"), False)
    elif isinstance(stage, int) and stage in range(4):
        note = "" if "stage" in given else "default 2"
        reading.ask("shard", neutral.LEVELS[stage], field("stage"), given.get("stage"), note)
    else:
        reading.problems.append(f"{field('stage')} is {shown(stage)!r}, but must be 0, 1, 2 or 3")
    pin, default = given.get("pin_memory"), "/local_nvme"
    for group in ("offload_optimizer", "offload_parameters"):
        if given.get(group) is True:
            where = given.get(f"{group.replace('parameters', 'params')}_device", "cpu")
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


_BY_CONFIG = {*DEEPSPEED} - {
    "config", "logging_level", "load_full_weights", "exclude_frozen_parameters", *_COMMON, *SCALE_KEYS
}  # fmt: skip
"""What Lightning builds a configuration from where none is given (``DeepSpeedStrategy._create_default_config``)."""

_SPECIAL = {"FSDPStrategy": _fsdp, "ModelParallelStrategy": _model_parallel, "DeepSpeedStrategy": _deepspeed}
