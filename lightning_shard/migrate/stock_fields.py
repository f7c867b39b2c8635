"""Stock Lightning's strategy names and the arguments of their classes, as data.

After ``lightning/pytorch/strategies`` of Lightning 2.6. Arguments whose meaning depends on others are marked by an
empty `Field` and read in ``lightning_yaml.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_shard.migrate.fields import Field
from lightning_shard.migrate.form import Engine

_BY_REFERENCE = Field()
_CPU = {"offload_optimizer": True}
_NVME = {
    "offload_optimizer": True,
    "offload_parameters": True,
    "remote_device": "nvme",
    "offload_params_device": "nvme",
    "offload_optimizer_device": "nvme",
}


def _ddp_names() -> dict[str, tuple[str, dict[str, Any]]]:
    names: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, start in (("ddp", "popen"), ("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork")):
        how = {} if start == "popen" else {"start_method": start}
        names[name] = ("DDPStrategy", how)
        for unused in (False, True):
            arguments = {"find_unused_parameters": unused, **how}
            names[f"{name}_find_unused_parameters_{str(unused).lower()}"] = ("DDPStrategy", arguments)
    return names


NAMES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "auto": ("DDPStrategy", {}),
    "single_device": ("SingleDeviceStrategy", {}),
    **_ddp_names(),
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, **_CPU}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": ("DeepSpeedStrategy", {"stage": 3, **_CPU, "offload_parameters": True}),
    "deepspeed_stage_3_offload_nvme": ("DeepSpeedStrategy", {"stage": 3, **_NVME}),
}
"""What the name of a stock strategy stands for: its class and arguments."""

ENGINES: Mapping[str, Engine] = {
    "DDPStrategy": "ddp",
    "SingleDeviceStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "fsdp",
    "DeepSpeedStrategy": "deepspeed",
}

_COMMON: Mapping[str, Field] = {
    "accelerator": Field(reason="the Trainer's", nearest="trainer.accelerator"),
    "parallel_devices": Field(reason="the Trainer's", nearest="trainer.devices"),
    "cluster_environment": Field(reason="the Trainer's", nearest="trainer.plugins"),
    "checkpoint_io": Field(reason="checkpoints are this package's own, which every engine reads"),
    "precision_plugin": Field(reason="strategies take none", nearest="trainer.precision, or ShardPrecision"),
    "process_group_backend": Field(kind="str", name="process_group_backend"),
    "timeout": _BY_REFERENCE,
}

_PYTHON = "it is a function or an object, which YAML can't carry over"

DDP: Mapping[str, Field] = {
    **_COMMON,
    "ddp_comm_state": Field(name="comm_state"),
    "ddp_comm_hook": _BY_REFERENCE,
    "ddp_comm_wrapper": Field(reason="hooks are not wrapped", nearest="comm_hook: fp16_compress or bf16_compress"),
    "model_averaging_period": Field(reason="models are averaged in every step"),
    "start_method": Field(
        kind="str",
        name="start_method",
        words={"POPEN": "popen", "SPAWN": "spawn", "FORK": "fork", "FORKSERVER": "forkserver"},
    ),
    "find_unused_parameters": Field(kind="bool", name="find_unused_parameters", idle=(False,)),
    "static_graph": Field(kind="bool", name="static_graph", idle=(False,)),
    "gradient_as_bucket_view": Field(kind="bool", name="gradient_as_bucket_view", idle=(False,)),
    "broadcast_buffers": Field(kind="bool", name="broadcast_buffers", idle=(True,)),
    "bucket_cap_mb": Field(kind="float", name="bucket_cap_mb"),
    "check_reduction": Field(kind="bool", idle=(False, True)),
    **dict.fromkeys(
        (
            "device_ids",
            "output_device",
            "dim",
            "process_group",
            "skip_all_reduce_unused_params",
            "bucket_cap_mb_list",
            "batched_grad_copy",
            "forward_sync_buffers",
        ),
        Field(idle=(False, 0), reason="only torch's own DistributedDataParallel has it"),
    ),
    "init_sync": Field(kind="bool", idle=(True,), reason="rank 0's values go to all ranks always"),
    "delay_all_reduce_named_params": Field(reason=_PYTHON),
    "param_to_hook_all_reduce": Field(reason=_PYTHON),
    "mixed_precision": Field(reason="strategies take none", nearest="trainer.precision, or ShardPrecision"),
    "device_mesh": Field(reason=_PYTHON),
}

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
SHARDING: Mapping[Any, str] = {
    **{name: name for name in _STRATEGIES},
    **dict(enumerate(_STRATEGIES, 1)),
}

FSDP: Mapping[str, Field] = {
    **_COMMON,
    "cpu_offload": _BY_REFERENCE,
    "mixed_precision": Field(
        reason="the dtypes are the precision's", nearest="ShardPrecision(precision=..., reduce=...)"
    ),
    "auto_wrap_policy": _BY_REFERENCE,
    "activation_checkpointing": _BY_REFERENCE,
    "activation_checkpointing_policy": _BY_REFERENCE,
    "sharding_strategy": _BY_REFERENCE,
    "state_dict_type": Field(kind="str", name="checkpoint_form", words={"FULL": "full", "SHARDED": "portable"}),
    "device_mesh": _BY_REFERENCE,
    "use_orig_params": Field(kind="bool", met="parameters keep their shapes and names always"),
    "sync_module_states": Field(kind="bool", met="rank 0's values go to all ranks always"),
    "limit_all_gathers": Field(kind="bool", met="FSDP2 holds at most the units that are set to be gathered ahead"),
    "forward_prefetch": Field(kind="bool", name="forward_prefetch", words={True: 1}, idle=(False,)),
    "backward_prefetch": Field(
        kind="word",
        idle=("BACKWARD_PRE", 1),
        words={"BACKWARD_POST": 2, 2: 2},
        reason="FSDP2 gathers the next unit while one runs backward, as BACKWARD_PRE; only memory and speed differ",
        nearest="nothing to set; backward_prefetch: n gathers n units ahead",
    ),
    "ignored_modules": Field(reason=_PYTHON, nearest="ignored_modules: [ClassName]"),
    "ignored_states": Field(reason=_PYTHON, nearest="ignored_modules: [ClassName]"),
    "param_init_fn": Field(reason=_PYTHON, nearest="reset_parameters in the modules; load_pretrained"),
    "device_id": Field(reason="the Trainer's", nearest="trainer.devices"),
    "process_group": Field(reason=_PYTHON, nearest="mesh"),
}

MODEL_PARALLEL: Mapping[str, Field] = {
    "data_parallel_size": _BY_REFERENCE,
    "tensor_parallel_size": _BY_REFERENCE,
    "save_distributed_checkpoint": Field(kind="bool", name="checkpoint_form", words={True: "portable", False: "full"}),
    "process_group_backend": Field(kind="str", name="process_group_backend"),
    "timeout": _BY_REFERENCE,
}

_SINGLE = ("accelerator", "checkpoint_io", "precision_plugin")
SINGLE_DEVICE: Mapping[str, Field] = {
    **{name: described for name, described in _COMMON.items() if name in _SINGLE},
    "device": Field(reason="the Trainer's", nearest="trainer.devices"),
}


def _config(key: str, kind: str, *idle: Any) -> Field:
    return Field(kind=kind, name=f"config.{key}", idle=idle)


DEEPSPEED: Mapping[str, Field] = {
    **{name: described for name, described in _COMMON.items() if name != "checkpoint_io"},
    "config": _BY_REFERENCE,
    "zero_optimization": _BY_REFERENCE,
    "stage": _BY_REFERENCE,
    "offload_optimizer": _BY_REFERENCE,
    "offload_optimizer_device": _BY_REFERENCE,
    "offload_parameters": _BY_REFERENCE,
    "offload_params_device": _BY_REFERENCE,
    "nvme_path": _BY_REFERENCE,
    "pin_memory": _BY_REFERENCE,
    "remote_device": Field(
        kind="str", met="build the model in configure_model, on the meta device: each unit is cut as it is made"
    ),
    "optimizer_buffer_count": Field(kind="int", name="offload_optimizer.buffer_count"),
    "params_buffer_count": Field(kind="int", name="offload_parameters.buffer_count"),
    "params_buffer_size": Field(kind="int", name="offload_parameters.buffer_size"),
    "max_in_cpu": Field(kind="int", name="offload_parameters.max_in_cpu"),
    "sub_group_size": Field(kind="int", name="stage3.sub_group_size"),
    "contiguous_gradients": Field(kind="bool", name="buckets.contiguous_gradients"),
    "overlap_comm": Field(kind="bool", name="buckets.overlap_comm"),
    "reduce_scatter": Field(kind="bool", name="buckets.reduce_scatter"),
    "allgather_bucket_size": Field(kind="int", name="buckets.allgather"),
    "reduce_bucket_size": Field(kind="int", name="buckets.reduce"),
    "allgather_partitions": _config("zero_optimization.allgather_partitions", "bool"),
    "block_size": _config("aio.block_size", "int", 1048576),
    "queue_depth": _config("aio.queue_depth", "int", 8),
    "single_submit": _config("aio.single_submit", "bool", False),
    "overlap_events": _config("aio.overlap_events", "bool", True),
    "thread_count": _config("aio.intra_op_parallelism", "int", 1),
    "zero_allow_untested_optimizer": _config("zero_allow_untested_optimizer", "bool", True),
    "logging_batch_size_per_gpu": _config("train_micro_batch_size_per_gpu", "int", "auto"),
    "logging_level": Field(
        idle=(30, "WARN", "WARNING"),
        reason="DeepSpeed's logger is left alone",
        nearest="logging.getLogger('DeepSpeed')",
    ),
    "loss_scale": _BY_REFERENCE,
    "initial_scale_power": _BY_REFERENCE,
    "loss_scale_window": _BY_REFERENCE,
    "hysteresis": _BY_REFERENCE,
    "min_loss_scale": _BY_REFERENCE,
    "partition_activations": _config("activation_checkpointing.partition_activations", "bool", False),
    "cpu_checkpointing": _config("activation_checkpointing.cpu_checkpointing", "bool", False),
    "contiguous_memory_optimization": _config("activation_checkpointing.contiguous_memory_optimization", "bool", False),
    "synchronize_checkpoint_boundary": _config(
        "activation_checkpointing.synchronize_checkpoint_boundary", "bool", False
    ),
    "load_full_weights": Field(kind="bool", idle=(False,), met="ckpt_path reads every form of checkpoint"),
    "exclude_frozen_parameters": Field(
        kind="bool",
        idle=(False,),
        reason="a checkpoint holds every parameter",
        nearest="`lightning-shard checkpoint export --module NAME`",
    ),
}

FIELDS: Mapping[str, Mapping[str, Field]] = {
    "DDPStrategy": DDP,
    "SingleDeviceStrategy": SINGLE_DEVICE,
    "FSDPStrategy": FSDP,
    "ModelParallelStrategy": MODEL_PARALLEL,
    "DeepSpeedStrategy": DEEPSPEED,
}
