"""The keys that DeepSpeed 0.19 reads, with the kind of value each takes, tested against the library: its pydantic
models say most; those that it reads with ``dict.get``, where a typo would pass, are written out here.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Section:
    """A mapping in the configuration."""

    keys: Mapping[str, Section | str]  # Key to its section, or to the kind of its value: a name in ``reading.READERS``.
    aliases: Mapping[str, str] = field(default_factory=dict)  # Other spelling to the one in ``keys``.
    model: Any = None  # The pydantic model that checks the section, where there is one.


def _keys(**kinds: str) -> dict[str, Section | str]:
    return {key: kind for kind, keys in kinds.items() for key in keys.split()}


TOP_LEVEL: Mapping[str, Section | str] = _keys(
    int="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps vocabulary_size",
    bool="managed_gradient_accumulation dump_state disable_python_gc disable_allgather prescale_gradients "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown "
    "dataloader_drop_last use_data_before_expert_parallelism",
    float="gradient_clipping gradient_predivide_factor",
    interval="steps_per_print",
    str="communication_data_type seq_parallel_communication_data_type gradient_allreduce_op log_level",
)

_WRITER = _keys(
    str="type data_parallel", bool="decoupled io_buffer_double show_statistics", int="io_buffer_size io_multiplier"
)

UNMODELLED: Mapping[str, Section] = {
    "optimizer": Section(keys=_keys(str="type", any="params", bool="legacy_fusion")),
    "scheduler": Section(keys=_keys(str="type", any="params")),
    "activation_checkpointing": Section(
        keys=_keys(
            bool="partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile "
            "cpu_checkpointing",
            int="number_checkpoints",
        )
    ),
    "aio": Section(
        keys=_keys(int="block_size queue_depth intra_op_parallelism", bool="single_submit overlap_events use_gds"),
        # Its name in older files.
        aliases={"thread_count": "intra_op_parallelism"},
    ),
    "flops_profiler": Section(
        keys=_keys(
            bool="enabled detailed",
            float="recompute_fwd_factor",
            int="profile_step module_depth top_modules",
            str="output_file",
        )
    ),
    "data_types": Section(keys=_keys(str="grad_accum_dtype param_dtype buffer_dtype", any="keep_in_fp32_modules")),
    "torch_autocast": Section(keys=_keys(bool="enabled", str="dtype", list="lower_precision_safe_modules")),
    "checkpoint": Section(
        keys={
            **_keys(str="tag_validation", bool="load_universal use_node_local_storage checkpoint_serialization"),
            "parallel_write": Section(keys=_keys(bool="pipeline_stage")),
            "writer": Section(keys=_WRITER),
        }
    ),
}

REMOVED: Mapping[str, str] = {
    "nebula": "DeepSpeed removed Nebula; checkpoints are this package's own",
    "compression_training": "DeepSpeed removed its compression library",
    "amp": "DeepSpeed removed Apex AMP; the Trainer's precision says the dtypes",
    "quantize_training": "DeepSpeed removed Mixture-of-Quantization",
    "eigenvalue": "DeepSpeed removed Mixture-of-Quantization, which it was for",
    "sparse_gradients": "DeepSpeed removed it; nn.Embedding(sparse=True) needs no setting",
    "sparse_attention": "DeepSpeed removed Sparse Attention",
    "elasticity": "DeepSpeed removed elastic training; the batch size is the dataloader's",
    "graph_harvesting": "DeepSpeed removed it",
    "curriculum_learning": "DeepSpeed removed it; order the samples in the dataloader",
    "progressive_layer_drop": "DeepSpeed removed it; drop layers in the model",
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
    "offload_optimizer.ratio": "DeepSpeed would step what stays on the device by an AdamW of its own, which follows no "
    "schedule and whose state no checkpoint would have",
}
"""What DeepSpeed has there, and what would be lost with it."""


@cache
def known_keys() -> Section:
    """The whole table for the installed DeepSpeed, which is imported here."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import precision_config as precision
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

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
    sections = {name: section_of(model) for name, model in modelled.items()}
    timers = Section(keys={"throughput": section_of(DeepSpeedThroughputTimerConfig)})
    return Section(keys={**TOP_LEVEL, **UNMODELLED, **sections, "timers": timers}, aliases={"bfloat16": "bf16"})


def section_of(model: Any) -> Section:
    """The keys of a pydantic model: the alias, as ``stage3_prefetch_bucket_size``, is the one that files have."""
    names = {name: info.alias or name for name, info in model.model_fields.items()}
    return Section(
        keys={names[name]: _kind(info.annotation) for name, info in model.model_fields.items()},
        aliases={name: alias for name, alias in names.items() if alias != name},
        model=model,
    )


def _kind(annotation: Any) -> Section | str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _kind(inner[0]) if len(inner) == 1 else "any"
    if annotation is list or typing.get_origin(annotation) is list:
        return "list"
    if not isinstance(annotation, type):
        return "any"
    if hasattr(annotation, "model_fields"):
        return section_of(annotation)
    if issubclass(annotation, enum.Enum):
        return "int" if issubclass(annotation, int) else "str"
    simple = {bool: "bool", int: "int", float: "float", str: "str", Path: "str"}
    return simple.get(annotation, "any")
