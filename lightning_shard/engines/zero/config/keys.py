"""The keys that DeepSpeed 0.19 reads: its pydantic models, and tables of those that it reads with ``dict.get``."""

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
    (dict, "checkpoint"),
    (_word("debug", "info", "warning", "error", "critical"), "log_level"),
)
"""Key to the type of its value, with the ranges that DeepSpeed asserts late or never."""

UNMODELLED: Mapping[str, Mapping[str, Any]] = {
    "optimizer": _keys((str, "type"), (dict, "params"), (bool, "legacy_fusion")),
    "scheduler": _keys((str, "type"), (dict, "params")),
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
}
"""Section to its keys."""

ALIASES = {"bfloat16": "bf16", "thread_count": "intra_op_parallelism"}
"""Older names of a section and of a key of ``aio``. DeepSpeed's models have aliases of their own."""

REMOVED: Mapping[str, str] = dict.fromkeys(
    (
        *("nebula", "compression_training", "amp", "quantize_training", "eigenvalue", "sparse_gradients"),
        *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
    ),
    "DeepSpeed removed it",
)
"""Sections that DeepSpeed 0.19 refuses, with the reason."""

FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(
        ("tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size", "data_parallel_size"),
        "the mesh of these strategies has no such axis",
    ),
    **dict.fromkeys(
        ("autotuning", "data_efficiency", "datastates_ckpt", "hybrid_engine", "weight_quantization"),
        "it needs DeepSpeed's own launcher, dataloader, checkpoints or generation",
    ),
}
"""Keys that DeepSpeed reads but that have no place under a Trainer, with the reason."""

_MICS = "DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid, which shards inside a node and replicates across nodes"

REMOVED_ZERO: Mapping[str, str] = {
    "mics_shard_size": _MICS,
    "mics_hierarchical_params_gather": _MICS,
    "zeropp_loco_param": "DeepSpeed 0.19 removed LoCo",
}
"""The same inside ``zero_optimization``."""

UNSEEN: Mapping[str, str] = dict.fromkeys(
    ("zenflow", "offload_optimizer.super_offload", "offload_optimizer.ratio"),
    "it steps a part of the parameters by an optimizer of its own, whose state no checkpoint would have",
)
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
