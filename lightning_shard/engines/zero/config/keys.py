"""The keys that DeepSpeed 0.19 reads: its pydantic models, and tables of the keys that it reads with ``dict.get``. A
typo in these would pass. Tests compare the tables with the installed library.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, create_model


def _keys(*kinds: tuple[Any, str], **sections: Mapping[str, Any]) -> dict[str, Any]:
    return {key: kind for kind, keys in kinds for key in keys.split()} | sections


def _word(*words: str) -> Any:
    return Annotated[Literal[words], BeforeValidator(lambda word: word.lower() if isinstance(word, str) else word)]


TOP_LEVEL: Mapping[str, Any] = _keys(
    (int, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps vocabulary_size"),
    (bool, "managed_gradient_accumulation dump_state disable_python_gc disable_allgather prescale_gradients"),
    (bool, "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown"),
    (bool, "dataloader_drop_last use_data_before_expert_parallelism"),
    (Annotated[FiniteFloat, Field(ge=0)], "gradient_clipping"),
    (Annotated[FiniteFloat, Field(gt=0)], "gradient_predivide_factor steps_per_print"),
    (_word("fp32", "bf16", "fp16"), "communication_data_type"),
    (str, "seq_parallel_communication_data_type gradient_allreduce_op"),
    (_word("debug", "info", "warning", "error", "critical"), "log_level"),
)
"""Key to the type of its value, with the ranges that DeepSpeed asserts late or never."""

_WRITER = _keys(
    (str, "type data_parallel"),
    (bool, "decoupled io_buffer_double show_statistics"),
    (int, "io_buffer_size io_multiplier"),
)

UNMODELLED: Mapping[str, Mapping[str, Any]] = {
    "optimizer": _keys((str, "type"), (Any, "params"), (bool, "legacy_fusion")),
    "scheduler": _keys((str, "type"), (Any, "params")),
    "activation_checkpointing": _keys(
        (bool, "partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile"),
        (bool, "cpu_checkpointing"),
        (int, "number_checkpoints"),
    ),
    "aio": _keys((int, "block_size queue_depth intra_op_parallelism"), (bool, "single_submit overlap_events use_gds")),
    "flops_profiler": _keys(
        (bool, "enabled detailed"),
        (FiniteFloat, "recompute_fwd_factor"),
        (int, "profile_step module_depth top_modules"),
        (str, "output_file"),
    ),
    "data_types": _keys((str, "grad_accum_dtype param_dtype buffer_dtype"), (Any, "keep_in_fp32_modules")),
    "torch_autocast": _keys((bool, "enabled"), (str, "dtype"), (list, "lower_precision_safe_modules")),
    "checkpoint": _keys(
        (str, "tag_validation"),
        (bool, "load_universal use_node_local_storage checkpoint_serialization"),
        parallel_write=_keys((bool, "pipeline_stage")),
        writer=_WRITER,
    ),
}
"""Section to its keys."""

ALIASES = {"bfloat16": "bf16", "thread_count": "intra_op_parallelism"}
"""Older names of a section and of a key of ``aio``. The models have aliases of their own."""

REMOVED: Mapping[str, str] = {
    "nebula": "DeepSpeed removed Nebula, and checkpoints are this package's own",
    "compression_training": "DeepSpeed removed its compression library",
    "amp": "DeepSpeed removed Apex AMP, and the Trainer's precision sets the dtypes",
    "quantize_training": "DeepSpeed removed Mixture-of-Quantization",
    "eigenvalue": "DeepSpeed removed Mixture-of-Quantization, which it was for",
    "sparse_gradients": "DeepSpeed removed it, and nn.Embedding(sparse=True) needs no setting",
    "sparse_attention": "DeepSpeed removed Sparse Attention",
    "elasticity": "DeepSpeed removed elastic training, and the batch size is the dataloader's",
    "graph_harvesting": "DeepSpeed removed it",
    "curriculum_learning": "DeepSpeed removed it. Order the samples in the dataloader",
    "progressive_layer_drop": "DeepSpeed removed it. Drop layers in the model",
}
"""Sections that DeepSpeed 0.19 refuses, with the reason."""

FOREIGN: Mapping[str, str] = {
    "tensor_parallel": "the mesh of these strategies has no tensor-parallel axis",
    "expert_parallel": "the mesh of these strategies has no expert-parallel axis",
    "pipeline": "these strategies do not run pipelines",
    "hybrid_engine": "these strategies train one model, without DeepSpeed's generation engine",
    "autotuning": "it needs DeepSpeed's own launcher",
    "data_efficiency": "it works through DeepSpeed's dataloader, and the Trainer has its own",
    "datastates_ckpt": "checkpoints are this package's own",
    "weight_quantization": "it is for inference with DeepSpeed's own engine",
    "sequence_parallel_size": "the mesh of these strategies has no sequence-parallel axis",
    "data_parallel_size": "the number of processes is devices x num_nodes",
}
"""Keys that DeepSpeed reads but that have no place under a Trainer, with the reason."""

_MICS = "DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid, which shards inside a node and replicates across nodes"

REMOVED_ZERO: Mapping[str, str] = {
    "mics_shard_size": _MICS,
    "mics_hierarchical_params_gather": _MICS,
    "zeropp_loco_param": "DeepSpeed 0.19 removed LoCo",
}
"""The same inside ``zero_optimization``."""

UNSEEN: Mapping[str, str] = {
    "zenflow": "it steps a part of a gradient late, by an optimizer of its own, whose state no checkpoint would have",
    "offload_optimizer.super_offload": "it steps in a process of its own, whose state no checkpoint would have",
    "offload_optimizer.ratio": "DeepSpeed would step the part on the device by an AdamW of its own, which follows no "
    "schedule and whose state no checkpoint would have",
}
"""Keys of ``zero_optimization`` whose state no checkpoint would hold, with the reason."""


@cache
def configuration() -> Any:
    """Make the model of the whole configuration for the installed DeepSpeed, which is imported here."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import precision_config as precision
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    def made(keys: Mapping[str, Any]) -> Any:
        kinds = {key: made(kind) if isinstance(kind, Mapping) else kind for key, kind in keys.items()}
        fields: dict[str, Any] = {key: (kind | None if kind is not Any else Any, None) for key, kind in kinds.items()}
        return create_model("Section", __base__=DeepSpeedConfigModel, **fields)

    modelled = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": precision.DeepSpeedFP16Config,
        "bf16": precision.DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig,
    }
    return made({**TOP_LEVEL, **UNMODELLED, **modelled, "timers": {"throughput": DeepSpeedThroughputTimerConfig}})


def names_of(model: Any) -> dict[str, str]:
    """Map each name of a field of ``model`` to the canonical one, such as ``stage3_prefetch_bucket_size``."""
    names = {name: info.alias or name for name, info in model.model_fields.items()}
    older = {old: new for old, new in ALIASES.items() if new in names}
    return {**{alias: alias for alias in names.values()}, **names, **older}


def section_of(model: Any, key: str) -> Any:
    """The model of a field that is a section. None: the field is a value."""
    info = next(info for name, info in model.model_fields.items() if key in (name, info.alias))
    kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
