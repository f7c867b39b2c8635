"""The keys that DeepSpeed 0.19 reads, with the kind of value each takes: one table, tested against the library.

Most sections are pydantic models, and their keys are taken from these. The others DeepSpeed reads with ``dict.get``,
so that a typo would pass in silence; they are written out here.
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

    keys: Mapping[str, Section | str]
    """Key to its section, or to the kind of its value: a name in ``reading.READERS``."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spelling to the one in ``keys``."""

    model: Any = None
    """The pydantic model that checks the section, where there is one."""


TOP_LEVEL: Mapping[str, str] = {
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "gradient_accumulation_steps": "int",
    "managed_gradient_accumulation": "bool",
    "gradient_clipping": "float",
    "steps_per_print": "interval",
    "dump_state": "bool",
    "disable_python_gc": "bool",
    "disable_allgather": "bool",
    "communication_data_type": "str",
    "seq_parallel_communication_data_type": "str",
    "prescale_gradients": "bool",
    "gradient_predivide_factor": "float",
    "gradient_allreduce_op": "str",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "wall_clock_breakdown": "bool",
    "memory_breakdown": "bool",
    "dataloader_drop_last": "bool",
    "use_data_before_expert_parallelism": "bool",
    "vocabulary_size": "int",
    "log_level": "str",
}

UNMODELLED: Mapping[str, Section] = {
    "optimizer": Section(keys={"type": "str", "params": "any", "legacy_fusion": "bool"}),
    "scheduler": Section(keys={"type": "str", "params": "any"}),
    "activation_checkpointing": Section(
        keys={
            "partition_activations": "bool",
            "number_checkpoints": "int",
            "contiguous_memory_optimization": "bool",
            "synchronize_checkpoint_boundary": "bool",
            "profile": "bool",
            "cpu_checkpointing": "bool",
        }
    ),
    "aio": Section(
        keys={
            "block_size": "int",
            "queue_depth": "int",
            "intra_op_parallelism": "int",
            "single_submit": "bool",
            "overlap_events": "bool",
            "use_gds": "bool",
        },
        # Its name in older files.
        aliases={"thread_count": "intra_op_parallelism"},
    ),
    "flops_profiler": Section(
        keys={
            "enabled": "bool",
            "recompute_fwd_factor": "float",
            "profile_step": "int",
            "module_depth": "int",
            "top_modules": "int",
            "detailed": "bool",
            "output_file": "str",
        }
    ),
    "data_types": Section(
        keys={"grad_accum_dtype": "str", "param_dtype": "str", "buffer_dtype": "str", "keep_in_fp32_modules": "any"}
    ),
    "torch_autocast": Section(keys={"enabled": "bool", "dtype": "str", "lower_precision_safe_modules": "list"}),
    "checkpoint": Section(
        keys={
            "tag_validation": "str",
            "load_universal": "bool",
            "use_node_local_storage": "bool",
            "checkpoint_serialization": "bool",
            "parallel_write": Section(keys={"pipeline_stage": "bool"}),
            "writer": Section(
                keys={
                    "type": "str",
                    "decoupled": "bool",
                    "io_buffer_size": "int",
                    "io_buffer_double": "bool",
                    "show_statistics": "bool",
                    "data_parallel": "str",
                    "io_multiplier": "int",
                }
            ),
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

REMOVED_ZERO: Mapping[str, str] = {
    "mics_shard_size": "DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid, which shards inside a node and replicates "
    "across nodes",
    "mics_hierarchical_params_gather": "DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid, which shards inside a "
    "node and replicates across nodes",
    "zeropp_loco_param": "DeepSpeed 0.19 removed LoCo",
}
"""The same inside ``zero_optimization``."""


@cache
def known_keys() -> Section:
    """The whole table for the installed DeepSpeed, which is imported here."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    modelled = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
    }
    sections = {name: section_of(model) for name, model in modelled.items()}
    timers = Section(keys={"throughput": section_of(DeepSpeedThroughputTimerConfig)})
    return Section(
        keys={**TOP_LEVEL, **UNMODELLED, **sections, "timers": timers},
        aliases={"bfloat16": "bf16"},
    )


def section_of(model: Any) -> Section:
    """The keys of a pydantic model: the alias, as ``stage3_prefetch_bucket_size``, is the one that files have."""
    keys: dict[str, Section | str] = {}
    aliases: dict[str, str] = {}
    for name, info in model.model_fields.items():
        canonical = info.alias or name
        keys[canonical] = _kind(info.annotation)
        if canonical != name:
            aliases[name] = canonical
    return Section(keys=keys, aliases=aliases, model=model)


def _kind(annotation: Any) -> Section | str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _kind(inner[0]) if len(inner) == 1 else "any"
    if typing.get_origin(annotation) is typing.Literal:
        return "str"
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
