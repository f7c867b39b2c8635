"""The table of equivalents: each setting, and what it is for each engine of this package.

Neutral settings have the names of this package's own arguments wherever one engine has an argument for it; an
engine's answer is `Equal`, `Holds` or `Without`, or several, of which the first that fits a value holds. The settings
that depend on each other (what is cut, offload, the mesh, precision) are put together in ``target.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_shard.migrate.answers import Answer, Equal, Holds, Row, Without


def find(name: str) -> Row:
    """The row of a setting."""
    return TABLE[name] if name in TABLE else _config_row(name)


_WHOLE = Holds(note="nothing is cut, so there is nothing to gather")
_STEP_PRECISION = "ShardPrecision(reduce=...)"


def _everywhere(kind: str) -> Row:
    return Row(kind=kind, ddp=(Equal(),), fsdp=(Equal(),), deepspeed=(Equal(),))


def _ddp_only(kind: str, *, idle: tuple[Any, ...], reason: str, nearest: str = "", holds: str = "") -> Row:
    other: Answer = Holds(note=holds) if holds else Without(reason=reason, nearest=nearest)
    others = (Holds(note="it is so anyway", values=idle), other)
    return Row(kind=kind, ddp=(Equal(),), fsdp=others, deepspeed=others)


def _deepspeed_only(
    kind: str, *, reason: str, nearest: str = "", idle: tuple[Any, ...] = (), note: str = "it is so anyway"
) -> Row:
    """``idle``: values that ask FSDP and DDP for nothing, with ``note`` as the reason."""
    auto = Holds(note="DeepSpeed's own choice was asked for", values=("auto",))
    others = (auto, Holds(note=note, values=idle), Without(reason=reason, nearest=nearest))
    return Row(kind=kind, ddp=others, fsdp=others, deepspeed=(Equal(),))


def _fsdp_only(kind: str, *, deepspeed: tuple[Answer, ...], ddp: tuple[Answer, ...] = (_WHOLE,)) -> Row:
    return Row(kind=kind, ddp=ddp, fsdp=(Equal(),), deepspeed=deepspeed)


_PREFETCH = "stage3.prefetch_bucket_size, in elements, for both directions"
_BUCKET = "collectives are not put together by a number of elements but by shard unit"
_FSDP_UNITS = "units: a number of parameters, or class names"
_LIMIT = "FSDP frees each unit after it has run; there is no limit to set"
_PUBLIC_DDP = "only torch's DistributedDataParallel has it"

TABLE: Mapping[str, Row] = {
    # Of all engines.
    "aligned": _everywhere("bool"),
    "log_grad_norm": _everywhere("bool"),
    "error_if_nonfinite": _everywhere("bool"),
    "timeout_seconds": _everywhere("float"),
    "process_group_backend": _everywhere("str"),
    "init_timeout_seconds": _everywhere("float"),
    "lost_rank_seconds": _everywhere("any"),
    "preemption": _everywhere("mapping"),
    "async_save": _everywhere("bool"),
    # FSDP's.
    "units": _fsdp_only(
        "any",
        deepspeed=(
            Holds(note="stage 3 finds what to gather by itself", values=("auto",)),
            Without(
                reason="ZeRO-3 gathers parameters module by module, as they are used, and has no units",
                nearest="stage3.module_granularity_threshold; stage3.leaf_modules for mixture-of-experts blocks",
            ),
        ),
    ),
    "forward_prefetch": _fsdp_only(
        "count",
        deepspeed=(
            Holds(note="ZeRO-3 gathers ahead anyway", values=(0,)),
            Without(reason="ZeRO-3 counts elements to gather ahead, not units", nearest=_PREFETCH),
        ),
    ),
    "backward_prefetch": _fsdp_only(
        "count",
        deepspeed=(
            Holds(note="ZeRO-3 gathers ahead anyway", values=(0,)),
            Without(reason="ZeRO-3 counts elements to gather ahead, not units", nearest=_PREFETCH),
        ),
    ),
    "activation_checkpointing": _everywhere("any"),
    "compile": _everywhere("bool"),
    "ignored_modules": _fsdp_only(
        "names",
        deepspeed=(
            Without(
                reason="ZeRO cuts every parameter",
                nearest="stage3.param_persistence_threshold: smaller parameters stay whole",
            ),
        ),
    ),
    "forward_methods": _fsdp_only(
        "names",
        deepspeed=(Holds(note="any method may run the model"),),
        ddp=(Without(reason="shard_ddp has no such argument", nearest="run the model by forward"),),
    ),
    # DDP's.
    "find_unused_parameters": _ddp_only(
        "bool",
        idle=(False,),
        reason="ranks that use different parameters in a step would wait for each other's gathers",
        nearest="shard_ddp; parameters that no rank uses in a step need no option",
    ),
    "static_graph": _ddp_only("bool", idle=(False,), reason=_PUBLIC_DDP, nearest="nothing is lost but some speed"),
    "gradient_as_bucket_view": _ddp_only("bool", idle=(False, True), reason="", holds="gradients are not copied"),
    "broadcast_buffers": _ddp_only(
        "bool",
        idle=(False,),
        reason="buffers are not broadcast before each training forward",
        nearest="SyncBatchNorm; evaluation and checkpoints use rank 0's buffers",
    ),
    "bucket_cap_mb": _ddp_only(
        "float", idle=(), reason=_BUCKET, nearest="buckets.reduce with DeepSpeed, units with FSDP"
    ),
    "comm_hook": _ddp_only("str", idle=(), reason=_PUBLIC_DDP, nearest=f"{_STEP_PRECISION}, the same in 16 bits"),
    "comm_state": _ddp_only("any", idle=(), reason=_PUBLIC_DDP),
    "start_method": _ddp_only(
        "str", idle=("popen",), reason="the other processes run the script again", nearest="popen"
    ),
    # DeepSpeed's.
    "offload_optimizer.nvme_path": _deepspeed_only("str", reason="only ZeRO-3 keeps state in files"),
    "offload_optimizer.pin_memory": _deepspeed_only(
        "bool", reason="", idle=(True, False), note="host memory is pinned on CUDA, and on CPU there is nothing to copy"
    ),
    "offload_optimizer.buffer_count": _deepspeed_only("int", reason="only ZeRO-3 keeps state in files", idle=(4,)),
    "offload_optimizer.fast_init": _deepspeed_only("bool", reason="only ZeRO-3 keeps state in files", idle=(False,)),
    "offload_optimizer.ratio": _deepspeed_only(
        "float", reason="FSDP offloads all or nothing", nearest="cpu_offload: true", idle=(1, 1.0)
    ),
    "offload_parameters.nvme_path": _deepspeed_only("str", reason="only ZeRO-3 keeps parameters in files"),
    "offload_parameters.pin_memory": _deepspeed_only(
        "bool", reason="", idle=(True, False), note="host memory is pinned on CUDA, and on CPU there is nothing to copy"
    ),
    "offload_parameters.buffer_count": _deepspeed_only("int", reason="only ZeRO-3 has files", idle=(5,)),
    "offload_parameters.buffer_size": _deepspeed_only("int", reason="only ZeRO-3 has files", idle=(100_000_000,)),
    "offload_parameters.max_in_cpu": _deepspeed_only("int", reason="only ZeRO-3 has files", idle=(1_000_000_000,)),
    "buckets.reduce": _deepspeed_only(
        "any",
        reason=_BUCKET,
        nearest=_FSDP_UNITS,
        idle=(500_000_000, 200_000_000),
        note="DeepSpeed's, or stock Lightning's, default",
    ),
    "buckets.allgather": _deepspeed_only(
        "int",
        reason=_BUCKET,
        nearest=_FSDP_UNITS,
        idle=(500_000_000, 200_000_000),
        note="DeepSpeed's, or stock Lightning's, default",
    ),
    "buckets.overlap_comm": _deepspeed_only(
        "bool", reason="communication always overlaps with compute", idle=(True,), note="it always overlaps"
    ),
    "buckets.contiguous_gradients": _deepspeed_only(
        "bool", reason="a unit's gradients are always copied into one buffer", idle=(True,)
    ),
    "buckets.reduce_scatter": _deepspeed_only(
        "bool", reason="each rank's part is always reduced to it alone", idle=(True,)
    ),
    "buckets.round_robin_gradients": _deepspeed_only(
        "bool", reason="gradients lie with the parameters' own shards", idle=(False,)
    ),
    "stage3.prefetch_bucket_size": _deepspeed_only(
        "any",
        reason="FSDP counts units to gather ahead, not elements",
        nearest="forward_prefetch and backward_prefetch",
        idle=(50_000_000,),
        note="DeepSpeed's default; FSDP gathers the next unit ahead",
    ),
    "stage3.param_persistence_threshold": _deepspeed_only(
        "any",
        reason="FSDP cuts every parameter of a unit",
        nearest="ignored_modules, by class name",
        idle=(0, 100_000),
        note="DeepSpeed's default, or no parameter; FSDP cuts all",
    ),
    "stage3.model_persistence_threshold": _deepspeed_only(
        "int", reason="FSDP cuts every parameter of a unit", nearest="ignored_modules, by class name"
    ),
    "stage3.max_live_parameters": _deepspeed_only(
        "int", reason=_LIMIT, nearest="units", idle=(1_000_000_000,), note="DeepSpeed's default"
    ),
    "stage3.max_reuse_distance": _deepspeed_only(
        "int", reason=_LIMIT, nearest="units", idle=(1_000_000_000,), note="DeepSpeed's default"
    ),
    "stage3.sub_group_size": _deepspeed_only(
        "int",
        reason="the optimizer steps all of a rank's shards at a time",
        idle=(1_000_000_000, 1_000_000_000_000),
        note="DeepSpeed's, or stock Lightning's, default",
    ),
    "stage3.module_granularity_threshold": _deepspeed_only(
        "int", reason="FSDP gathers by unit", nearest=_FSDP_UNITS, idle=(0,)
    ),
    "stage3.leaf_modules": _deepspeed_only("names", reason="FSDP gathers by unit", nearest="units with these classes"),
    "zero_plus_plus.quantized_weights": _deepspeed_only(
        "bool", reason="parameters are gathered in the compute dtype", idle=(False,)
    ),
    "zero_plus_plus.quantized_nontrainable_weights": _deepspeed_only(
        "bool", reason="frozen parameters keep their dtype", idle=(False,)
    ),
    "zero_plus_plus.quantized_gradients": _deepspeed_only(
        "bool",
        reason="gradients are reduced in fp32 or 16 bits",
        nearest=_STEP_PRECISION,
        idle=(False,),
    ),
    # The Trainer's, on all engines.
    "trainer.gradient_clip_val": _everywhere("any"),
    "trainer.gradient_clip_algorithm": _everywhere("str"),
    "trainer.accumulate_grad_batches": _everywhere("int"),
    "trainer.num_nodes": _everywhere("int"),
    "trainer.devices": _everywhere("any"),
    "trainer.accelerator": _everywhere("str"),
}
"""Setting to its answers; those of DeepSpeed's further keys are in `CONFIG`."""

_EXPORT = (Holds(note="every checkpoint can be written so: `lightning-shard checkpoint export --dtype bf16`"),)
_CHECKPOINTING = (
    Without(
        reason="the strategy does not call deepspeed.checkpointing.configure",
        nearest="activation_checkpointing: units; or that call in configure_model",
    ),
)
_LOGS = (Holds(note="DeepSpeed's own prints; the Trainer logs by log_every_n_steps"),)
_MODEL = "the optimizer comes from configure_optimizers, or `optimizer:` in the YAML"

CONFIG: Mapping[str, Row] = {
    "optimizer": _deepspeed_only("any", reason=_MODEL, nearest="optimizer: {class_path: torch.optim.AdamW, ...}"),
    "scheduler": _deepspeed_only(
        "any", reason="the schedule comes from configure_optimizers, or `lr_scheduler:` in the YAML"
    ),
    "activation_checkpointing": Row(ddp=_CHECKPOINTING, fsdp=_CHECKPOINTING, deepspeed=_CHECKPOINTING),
    "fp16": _deepspeed_only(
        "any", reason="a loss scale goes with precision 16-mixed", nearest="ShardPrecision(loss_scale=...)"
    ),
    "train_batch_size": _deepspeed_only("any", reason="the batch size is the dataloader's", nearest="data: batch_size"),
    "train_micro_batch_size_per_gpu": _deepspeed_only(
        "any", reason="the batch size is the dataloader's", nearest="data: batch_size"
    ),
    "steps_per_print": Row(ddp=_LOGS, fsdp=_LOGS, deepspeed=(Equal(),)),
    "zero_allow_untested_optimizer": _deepspeed_only("any", reason="any optimizer runs", idle=(True, False)),
    "zero_force_ds_cpu_optimizer": _deepspeed_only("any", reason="any optimizer runs", idle=(True, False)),
    "zero_optimization.allgather_partitions": _deepspeed_only(
        "any", reason="parameters are gathered by unit", idle=(True,)
    ),
    "zero_optimization.load_from_fp32_weights": _deepspeed_only(
        "any", reason="masters are always in the checkpoint", idle=(True,)
    ),
    "zero_optimization.ignore_unused_parameters": _deepspeed_only(
        "any", reason="parameters without a gradient are always left alone", idle=(True,)
    ),
    "zero_optimization.elastic_checkpoint": _deepspeed_only(
        "any", reason="checkpoints load at any number of processes", idle=(True, False)
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Row(ddp=_EXPORT, fsdp=_EXPORT, deepspeed=_EXPORT),
    "data_types.grad_accum_dtype": _deepspeed_only(
        "any",
        reason="gradients are summed in the precision's own dtype",
        nearest="precision, or an _aligned name",
        idle=("fp32", "float32", "torch.float32"),
        note="fp32 in every mixed precision",
    ),
}
"""Keys that stay in ``config`` under DeepSpeed and have an answer of their own elsewhere."""

_OTHER = _deepspeed_only("any", reason="only DeepSpeed has it", idle=(False,), note="it is off")


def _config_row(name: str) -> Row:
    """The row of ``config.KEY``: DeepSpeed keeps the key in ``config``."""
    key = name.removeprefix("config.")
    row = CONFIG.get(key) or CONFIG.get(key.partition(".")[0]) or _OTHER
    if not isinstance(row.deepspeed[0], Equal):
        return row
    return replace(row, deepspeed=(Equal(path=name),))
