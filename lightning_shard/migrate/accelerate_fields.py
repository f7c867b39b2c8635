"""The fields of an Accelerate config file, as data: what each becomes, or why it becomes nothing.

After ``accelerate/commands/config`` and ``commands/launch.py`` of Accelerate 1.15, and the spellings of older files.
Fields whose meaning depends on others are marked by an empty `Field` and read in ``accelerate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_shard.migrate.fields import Field

_LAUNCHER = "the launcher's; see the first lines of the file that is written"
_TPU = Field(
    kind="any",
    idle=(False, "no", "NO", "", [], [""]),
    reason="there is no engine for TPUs here",
    nearest="Lightning's own strategy xla",
)
_BY_REFERENCE = Field()

TOP: Mapping[str, Field] = {
    "compute_environment": _BY_REFERENCE,
    "distributed_type": _BY_REFERENCE,
    "mixed_precision": _BY_REFERENCE,
    "fp16": _BY_REFERENCE,
    "num_processes": _BY_REFERENCE,
    "num_machines": _BY_REFERENCE,
    "machine_rank": _BY_REFERENCE,
    "gpu_ids": _BY_REFERENCE,
    "use_cpu": _BY_REFERENCE,
    "main_process_ip": _BY_REFERENCE,
    "main_process_port": _BY_REFERENCE,
    "fsdp_config": _BY_REFERENCE,
    "deepspeed_config": _BY_REFERENCE,
    "parallelism_config": _BY_REFERENCE,
    "dynamo_config": _BY_REFERENCE,
    "dynamo_backend": _BY_REFERENCE,
    "megatron_lm_config": _BY_REFERENCE,
    "fp8_config": _BY_REFERENCE,
    "tp_config": _BY_REFERENCE,
    "mpirun_config": _BY_REFERENCE,
    "ipex_config": _BY_REFERENCE,
    "rdzv_backend": Field(kind="str", idle=("static", "STATIC", ""), met=_LAUNCHER),
    "same_network": Field(kind="bool", idle=(True, False)),
    "main_training_function": Field(
        kind="str",
        idle=("main", "MAIN"),
        reason="the Trainer runs the training loop",
        nearest="the LightningModule's training_step",
    ),
    "debug": Field(
        kind="bool",
        idle=(False,),
        reason="shapes are not compared before each collective",
        nearest="`lightning-shard doctor`; ranks that come apart end with a message (lost_rank_seconds)",
    ),
    "enable_cpu_affinity": Field(
        kind="bool",
        idle=(False,),
        reason="processes are not bound to cores",
        nearest="srun --cpu-bind, or numactl before the command",
    ),
    "use_mps_device": Field(kind="bool", idle=(False,), reason="the engines run on CPU and CUDA"),
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
}

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP version 1; files also have their place, from 1."""

POLICIES = {"TRANSFORMER_BASED_WRAP": "classes", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}

FSDP: Mapping[str, Field] = {
    "fsdp_version": _BY_REFERENCE,
    "fsdp_sharding_strategy": _BY_REFERENCE,
    "fsdp_reshard_after_forward": _BY_REFERENCE,
    "fsdp_auto_wrap_policy": _BY_REFERENCE,
    "fsdp_transformer_layer_cls_to_wrap": _BY_REFERENCE,
    "fsdp_min_num_params": _BY_REFERENCE,
    "fsdp_cpu_ram_efficient_loading": _BY_REFERENCE,
    "fsdp_sync_module_states": _BY_REFERENCE,
    "fsdp_forward_prefetch": _BY_REFERENCE,
    "fsdp_offload_params": Field(kind="bool", name="cpu_offload", idle=(False,)),
    "fsdp_backward_prefetch": Field(
        kind="word",
        idle=("BACKWARD_PRE", 1),
        words={"BACKWARD_POST": 2, 2: 2, "NO_PREFETCH": 3, 3: 3},
        reason="FSDP2 gathers the next unit while one runs backward, as BACKWARD_PRE; only memory and speed differ",
        nearest="nothing to set; backward_prefetch: n gathers n units ahead",
    ),
    "fsdp_state_dict_type": Field(
        kind="word",
        name="checkpoint_form",
        words={
            "FULL_STATE_DICT": "full",
            1: "full",
            "SHARDED_STATE_DICT": "portable",
            3: "portable",
            "LOCAL_STATE_DICT": "local",
            2: "local",
        },
    ),
    "fsdp_use_orig_params": Field(
        kind="bool", met="parameters keep their shapes and names always; the numbers are the same"
    ),
    "fsdp_activation_checkpointing": Field(
        kind="bool", name="activation_checkpointing", words={True: "units"}, idle=(False,)
    ),
    "fsdp_activation_checkpointing_offload": Field(
        kind="bool",
        idle=(False,),
        reason="checkpointed inputs stay on the device",
        nearest="torch.autograd.graph.save_on_cpu in the model",
    ),
    "fsdp_ignored_modules": Field(
        kind="any",
        reason="modules are ignored by their class, not by a pattern of names",
        nearest="ignored_modules: [ClassName]",
    ),
}

OLD_FSDP = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
"""Spelling of older files to the one above; keys without their ``fsdp_`` are read too, as Accelerate does."""

_HOSTS = Field(
    kind="str", idle=("",), reason="DeepSpeed's launcher is not used", nearest="`lightning-shard slurm`, or torchrun"
)

DEEPSPEED: Mapping[str, Field] = {
    "deepspeed_config_file": _BY_REFERENCE,
    "zero_stage": Field(kind="int", name="shard", words={0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}),
    "offload_optimizer_device": Field(
        kind="str", name="offload_optimizer.device", words={"CPU": "cpu", "NVME": "nvme"}, idle=("none", "NONE")
    ),
    "offload_param_device": Field(
        kind="str", name="offload_parameters.device", words={"CPU": "cpu", "NVME": "nvme"}, idle=("none", "NONE")
    ),
    "offload_optimizer_nvme_path": Field(kind="str", name="offload_optimizer.nvme_path", idle=("none",)),
    "offload_param_nvme_path": Field(kind="str", name="offload_parameters.nvme_path", idle=("none",)),
    "gradient_accumulation_steps": Field(kind="int", name="trainer.accumulate_grad_batches", idle=("auto",)),
    "gradient_clipping": Field(
        kind="float",
        name="trainer.gradient_clip_val",
        idle=("auto", 0.0),
        note="the norm is summed in fp64, then torch's formula; DeepSpeed's own sums in fp32",
    ),
    "zero3_init_flag": Field(
        kind="bool",
        idle=(False,),
        met="build the model in configure_model, on the meta device: each unit is given its values and cut in turn",
    ),
    "zero3_save_16bit_model": Field(
        kind="bool",
        idle=(False,),
        met="every checkpoint can be written so: `lightning-shard checkpoint export --dtype bf16`",
    ),
    "deepspeed_moe_layer_cls_names": Field(kind="names", name="stage3.leaf_modules"),
    "deepspeed_multinode_launcher": Field(
        kind="str",
        idle=("standard", "STANDARD"),
        reason="DeepSpeed's launcher is not used",
        nearest="`lightning-shard slurm`, or torchrun",
    ),
    "deepspeed_hostfile": _HOSTS,
    "deepspeed_exclusion_filter": _HOSTS,
    "deepspeed_inclusion_filter": _HOSTS,
}

IGNORED_WITH_A_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""What Accelerate refuses beside ``deepspeed_config_file`` (``DeepSpeedPlugin._deepspeed_config_checks``)."""

_AXIS = "the mesh has the axes replicate and shard only"
_AXIS_ELSEWHERE = "torch's parallelize_module in configure_model; torchtitan or Megatron-Core"


def _axis() -> Field:
    return Field(kind="int", idle=(1,), reason=_AXIS, nearest=_AXIS_ELSEWHERE)


_AXIS_OPTION = Field(idle=("torch", "TORCH", "deepspeed", "DEEPSPEED", "allgather"), reason=_AXIS, nearest="")

PARALLELISM: Mapping[str, Field] = {
    "dp_replicate_size": _BY_REFERENCE,
    "dp_shard_size": _BY_REFERENCE,
    "tp_size": _axis(),
    "cp_size": _axis(),
    "sp_size": _axis(),
    "cp_backend": _AXIS_OPTION,
    "cp_comm_strategy": _AXIS_OPTION,
    "sp_backend": _AXIS_OPTION,
    "sp_seq_length": _AXIS_OPTION,
    "sp_seq_length_is_variable": _AXIS_OPTION,
    "sp_attn_implementation": _AXIS_OPTION,
}

DYNAMO: Mapping[str, Field] = {
    "dynamo_backend": Field(
        kind="str",
        name="compile",
        words={"INDUCTOR": True},
        idle=("NO",),
        note="each unit's forward is compiled by itself",
    ),
    "dynamo_mode": Field(
        kind="str", idle=("default", "DEFAULT"), reason="torch.compile is called with its defaults", nearest="compile"
    ),
    "dynamo_use_fullgraph": Field(
        kind="bool", idle=(False,), reason="torch.compile is called with its defaults", nearest="compile"
    ),
    "dynamo_use_dynamic": Field(
        kind="bool", idle=(False,), reason="torch.compile is called with its defaults", nearest="compile"
    ),
    "dynamo_use_regional_compilation": Field(kind="bool", met="each unit's forward is compiled by itself"),
}

OTHER_BACKENDS = (
    "EAGER",
    "AOT_EAGER",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORCHXLA_TRACE_ONCE",
    "IPEX",
    "TVM",
    "HPU_BACKEND",
)

DISTRIBUTED = {
    "NO": "ddp",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "fsdp",
    "TP": "fsdp",
}
"""``distributed_type`` to the engine; for the last two, the nearest one."""

OTHER_DEVICES = ("MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON", "XLA")

PRECISIONS = {"NO": "32-true", "FP16": "16-mixed", "BF16": "bf16-mixed"}
