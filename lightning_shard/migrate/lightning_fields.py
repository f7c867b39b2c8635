"""The arguments of stock Lightning's strategies, as data.

After ``lightning/pytorch/strategies`` of Lightning 2.6. Arguments that are read elsewhere are read in
``lightning_strategies.py``.
"""

from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.zero.config.checks import SCALE_KEYS
from lightning_shard.migrate.accelerate_fields import backward_prefetch
from lightning_shard.migrate.neutral import READ_ELSEWHERE, Engine, Field, satisfied, setting, unsupported

ENGINES: Mapping[str, Engine] = {
    "DDPStrategy": "ddp",
    "SingleDeviceStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "fsdp",
    "DeepSpeedStrategy": "deepspeed",
}

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
    "start_method": setting(
        "start_method", "str", words={name: name for name in ("popen", "spawn", "fork", "forkserver")}
    ),
    "find_unused_parameters": setting("find_unused_parameters", "bool", False),
    "static_graph": setting("static_graph", "bool", False),
    "gradient_as_bucket_view": setting("gradient_as_bucket_view", "bool", False),
    "broadcast_buffers": setting("broadcast_buffers", "bool", True),
    "bucket_cap_mb": setting("bucket_cap_mb", "float"),
    "check_reduction": setting("", "bool", False, True),
    **dict.fromkeys(
        (
            "device_ids", "output_device", "dim", "process_group", "skip_all_reduce_unused_params",
            "bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers",
        ),
        unsupported("only torch's own DistributedDataParallel has it", "", "any", False, 0),
    ),
    "init_sync": unsupported("rank 0's values go to all ranks always", "", "bool", True),
    "delay_all_reduce_named_params": unsupported(_PYTHON),
    "param_to_hook_all_reduce": unsupported(_PYTHON),
    "mixed_precision": unsupported("strategies take none", "trainer.precision, or ShardPrecision"),
    "device_mesh": unsupported(_PYTHON),
}  # fmt: skip

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
SHARDING: Mapping[Any, str] = {**{name: name for name in _STRATEGIES}, **dict(enumerate(_STRATEGIES, 1))}

FSDP: Mapping[str, Field] = {
    **_COMMON,
    **dict.fromkeys(
        (
            "cpu_offload", "auto_wrap_policy", "activation_checkpointing", "activation_checkpointing_policy",
            "sharding_strategy", "device_mesh",
        ),
        READ_ELSEWHERE,
    ),
    "mixed_precision": unsupported("the dtypes are the precision's", "ShardPrecision(precision=..., reduce=...)"),
    "state_dict_type": setting("checkpoint_form", "str", words={"FULL": "full", "SHARDED": "portable"}),
    "use_orig_params": satisfied("parameters keep their shapes and names always", "bool"),
    "sync_module_states": satisfied("rank 0's values go to all ranks always", "bool"),
    "limit_all_gathers": satisfied("FSDP2 gathers no more units than are set to be gathered ahead", "bool"),
    "forward_prefetch": setting("forward_prefetch", "bool", False, words={True: 1}),
    "backward_prefetch": backward_prefetch({"BACKWARD_POST": 2, 2: 2}),
    "ignored_modules": unsupported(_PYTHON, "ignored_modules: [ClassName]"),
    "ignored_states": unsupported(_PYTHON, "ignored_modules: [ClassName]"),
    "param_init_fn": unsupported(_PYTHON, "reset_parameters in the modules; load_pretrained"),
    "device_id": _DEVICES,
    "process_group": unsupported(_PYTHON, "mesh"),
}  # fmt: skip

MODEL_PARALLEL: Mapping[str, Field] = {
    **dict.fromkeys(("data_parallel_size", "tensor_parallel_size", "timeout"), READ_ELSEWHERE),
    "save_distributed_checkpoint": setting("checkpoint_form", "bool", words={True: "portable", False: "full"}),
    "process_group_backend": _COMMON["process_group_backend"],
}

SINGLE_DEVICE: Mapping[str, Field] = {
    **{name: _COMMON[name] for name in ("accelerator", "checkpoint_io", "precision_plugin")},
    "device": _DEVICES,
}

_CHECKPOINTING = (
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "synchronize_checkpoint_boundary"
)  # fmt: skip

DEEPSPEED: Mapping[str, Field] = {
    **{name: described for name, described in _COMMON.items() if name != "checkpoint_io"},
    **dict.fromkeys(
        (
            "config", "zero_optimization", "stage", "offload_optimizer", "offload_optimizer_device",
            "offload_parameters", "offload_params_device", "nvme_path", "pin_memory",
        ),
        READ_ELSEWHERE,
    ),
    **dict.fromkeys(SCALE_KEYS, Field(kind="int")),
    **dict.fromkeys(("loss_scale", "min_loss_scale"), Field(kind="float")),
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
    **{name: setting(f"config.activation_checkpointing.{name}", "bool", False) for name in _CHECKPOINTING},
    "load_full_weights": satisfied("ckpt_path reads every form of checkpoint", "bool", False),
    "exclude_frozen_parameters": unsupported(
        "a checkpoint holds every parameter", "`lightning-shard checkpoint export --module NAME`", "bool", False,
        effect="memory",
    ),
}  # fmt: skip

FIELDS: Mapping[str, Mapping[str, Field]] = {
    "DDPStrategy": DDP,
    "SingleDeviceStrategy": SINGLE_DEVICE,
    "FSDPStrategy": FSDP,
    "ModelParallelStrategy": MODEL_PARALLEL,
    "DeepSpeedStrategy": DEEPSPEED,
}

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
    found = next((table[argument] for table in FIELDS.values() if argument in table), READ_ELSEWHERE)
    if found is READ_ELSEWHERE and argument not in _CALLED:
        return ""
    called = _CALLED.get(argument) or found.name or found.nearest
    reason = f": {found.met or found.reason}" if argument not in _CALLED and not found.name else ""
    return f" It is stock Lightning's{reason}." + (f" Use {called}." if called else " Remove it.")
