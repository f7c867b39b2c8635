"""The fields of an Accelerate config file, as data: what each becomes, or why it becomes nothing.

After ``accelerate/commands/config`` and ``commands/launch.py`` of Accelerate 1.15, and the spellings of older files.
Fields that are read elsewhere are read in ``accelerate.py``.
"""

from collections.abc import Mapping
from typing import Any

from lightning_shard.migrate.deepspeed_json import CLIP_NOTE
from lightning_shard.migrate.neutral import READ_ELSEWHERE, Field, satisfied, setting, unsupported

_TPU_FIELDS = (
    "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file",
    "commands",
)  # fmt: skip
_TPU = satisfied("Accelerate reads it on TPUs alone", "any", False, "no", "", [], [""])

TOP: Mapping[str, Field] = {
    **dict.fromkeys(
        (
            "compute_environment", "distributed_type", "mixed_precision", "fp16", "machine_rank", "gpu_ids",
            "main_process_ip", "main_process_port", "fsdp_config", "deepspeed_config", "parallelism_config",
            "dynamo_config", "dynamo_backend", "megatron_lm_config", "fp8_config", "tp_config", "mpirun_config",
            "ipex_config",
        ),
        READ_ELSEWHERE,
    ),
    **dict.fromkeys(("num_machines", "num_processes"), Field(kind="int")),
    "use_cpu": Field(kind="bool"),
    "rdzv_backend": satisfied(
        "the launcher's; see the first lines of the file that is written", "str", "static", ""
    ),
    "same_network": setting("", "bool", True, False),
    "main_training_function": unsupported(
        "the Trainer runs the training loop", "the LightningModule's training_step", "str", "main"
    ),
    "debug": unsupported(
        "shapes are not compared before each collective",
        "`lightning-shard doctor`; ranks that come apart end with a message (lost_rank_seconds)", "bool", False,
        effect="speed",
    ),
    "enable_cpu_affinity": unsupported(
        "processes are not bound to cores", "srun --cpu-bind, or numactl before the command", "bool", False,
        effect="speed",
    ),
    "use_mps_device": unsupported("the engines run on CPU and CUDA", "", "bool", False),
    **dict.fromkeys(_TPU_FIELDS, _TPU),
}  # fmt: skip

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP version 1; files may also have their number in this list, from 1."""

POLICIES = {"TRANSFORMER_BASED_WRAP": "classes", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}


def backward_prefetch(words: Mapping[Any, Any]) -> Field:
    """``backward_prefetch`` of FSDP version 1, in Accelerate as in stock Lightning; ``words``: all but BACKWARD_PRE."""
    return unsupported(
        "FSDP2 gathers the next unit while one runs backward, as BACKWARD_PRE; only memory and speed differ",
        "nothing to set; backward_prefetch: n gathers n units ahead", "any", "BACKWARD_PRE", 1, words=words,
        effect="speed",
    )  # fmt: skip


FSDP: Mapping[str, Field] = {
    **dict.fromkeys(
        (
            "fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy",
        ),
        READ_ELSEWHERE,
    ),
    "fsdp_transformer_layer_cls_to_wrap": Field(kind="names", idle=("",)),
    "fsdp_min_num_params": Field(kind="count"),
    "fsdp_cpu_ram_efficient_loading": satisfied(
        "build the model in configure_model, on the meta device; load_pretrained reads each process's slices alone",
        "bool", False,
    ),
    "fsdp_sync_module_states": satisfied("rank 0's values go to all ranks always", "bool"),
    "fsdp_forward_prefetch": setting("forward_prefetch", "bool", False, words={True: 1}),
    "fsdp_offload_params": setting("cpu_offload", "bool", False),
    "fsdp_backward_prefetch": backward_prefetch({"BACKWARD_POST": 2, 2: 2, "NO_PREFETCH": 3, 3: 3}),
    "fsdp_state_dict_type": setting(
        "checkpoint_form", "any",
        words={"FULL_STATE_DICT": "full", 1: "full", "SHARDED_STATE_DICT": "portable", 3: "portable",
               "LOCAL_STATE_DICT": "local", 2: "local"},
    ),
    "fsdp_use_orig_params": satisfied(
        "parameters keep their shapes and names always; the numbers are the same", "bool"
    ),
    "fsdp_activation_checkpointing": setting("activation_checkpointing", "bool", False, words={True: "units"}),
    "fsdp_activation_checkpointing_offload": unsupported(
        "checkpointed inputs stay on the device", "torch.autograd.graph.save_on_cpu in the model", "bool", False,
        effect="memory",
    ),
    "fsdp_ignored_modules": unsupported(
        "modules are ignored by their class, not by a pattern of names", "ignored_modules: [ClassName]"
    ),
}  # fmt: skip

FSDP_2: Mapping[str, Field] = {
    **FSDP,
    "fsdp_reshard_after_forward": setting("shard", "bool", words={True: "parameters", False: "gradients"}),
    "fsdp_forward_prefetch": satisfied("Accelerate does not read it with fsdp_version 2 either", "bool", False),
}

OLD_FSDP = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
"""Spelling of older files to the one above; keys without their ``fsdp_`` are read too, as Accelerate does."""

_NO_LAUNCHER = ("DeepSpeed's launcher is not used", "`lightning-shard slurm`, or torchrun", "str")
_DEVICES = {"CPU": "cpu", "NVME": "nvme"}

DEEPSPEED: Mapping[str, Field] = {
    "deepspeed_config_file": READ_ELSEWHERE,
    "zero_stage": setting("shard", "int", words={0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}),
    "offload_optimizer_device": setting("offload_optimizer.device", "str", "none", words=_DEVICES),
    "offload_param_device": setting("offload_parameters.device", "str", "none", words=_DEVICES),
    "offload_optimizer_nvme_path": setting("offload_optimizer.nvme_path", "str", "none"),
    "offload_param_nvme_path": setting("offload_parameters.nvme_path", "str", "none"),
    "gradient_accumulation_steps": setting("trainer.accumulate_grad_batches", "int", "auto"),
    "gradient_clipping": setting("trainer.gradient_clip_val", "float", "auto", 0.0, note=CLIP_NOTE),
    "zero3_init_flag": satisfied(
        "build the model in configure_model, on the meta device: each unit is given its values and sharded in turn",
        "bool", False,
    ),
    "zero3_save_16bit_model": satisfied(
        "every checkpoint can be written so: `lightning-shard checkpoint export --dtype bf16`", "bool", False
    ),
    "deepspeed_moe_layer_cls_names": setting("stage3.leaf_modules", "names"),
    "deepspeed_multinode_launcher": unsupported(*_NO_LAUNCHER, "standard", effect="speed"),
    "deepspeed_hostfile": unsupported(*_NO_LAUNCHER, "", effect="speed"),
    "deepspeed_exclusion_filter": unsupported(*_NO_LAUNCHER, "", effect="speed"),
    "deepspeed_inclusion_filter": unsupported(*_NO_LAUNCHER, "", effect="speed"),
}  # fmt: skip

REFUSED_BESIDE_A_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""What Accelerate refuses beside ``deepspeed_config_file`` (``DeepSpeedPlugin._deepspeed_config_checks``)."""

_AXES = "the mesh has the axes replicate and shard only"
_AXIS = unsupported(_AXES, "torch's parallelize_module in configure_model; torchtitan or Megatron-Core", "int", 1)
_AXIS_OPTION = unsupported(_AXES, "", "any", "torch", "deepspeed", "allgather")

PARALLELISM: Mapping[str, Field] = {
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size"), Field(kind="int")),
    **dict.fromkeys(("tp_size", "cp_size", "sp_size"), _AXIS),
    **dict.fromkeys(
        (
            "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
            "sp_attn_implementation",
        ),
        _AXIS_OPTION,
    ),
}  # fmt: skip

_COMPILED = "each unit's forward is compiled by itself"
_DEFAULT_COMPILE = ("torch.compile is called with its defaults", "compile")

DYNAMO: Mapping[str, Field] = {
    "dynamo_backend": setting("compile", "str", "NO", words={"INDUCTOR": True}, note=_COMPILED),
    "dynamo_mode": unsupported(*_DEFAULT_COMPILE, "str", "default", effect="speed"),
    "dynamo_use_fullgraph": unsupported(*_DEFAULT_COMPILE, "bool", False, effect="speed"),
    "dynamo_use_dynamic": unsupported(*_DEFAULT_COMPILE, "bool", False, effect="speed"),
    "dynamo_use_regional_compilation": satisfied(_COMPILED, "bool"),
}

OTHER_BACKENDS = (
    "EAGER", "AOT_EAGER", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT", "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "IPEX", "TVM", "HPU_BACKEND",
)  # fmt: skip

DISTRIBUTED = {
    "NO": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "fsdp", "TP": "fsdp",
}  # fmt: skip
"""``distributed_type`` to the engine; for the last two, the nearest one."""

OTHER_DEVICES = ("MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON", "XLA")

PRECISIONS = {"NO": "32-true", "FP16": "16-mixed", "BF16": "bf16-mixed"}
