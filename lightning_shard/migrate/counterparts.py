"""The table of counterparts: what each setting, named as this package's own argument where there is one, is for each
engine. Settings that depend on each other are in ``dependent_settings.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_shard.migrate.neutral import Effect, Engine, Field, satisfied, unsupported

CLASSES: Mapping[Engine, str] = {
    "ddp": "lightning_shard.ShardDDPStrategy",
    "fsdp": "lightning_shard.ShardFSDPStrategy",
    "deepspeed": "lightning_shard.ShardDeepSpeedStrategy",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What engines answer to a setting, as their fields would; None: one has the same, under the same name."""

    ddp: Field | None = None
    fsdp: Field | None = None
    deepspeed: Field | None = None
    kind: str = "any"  # Of the values that this package's own YAML has: a key of `KINDS`.


def find(name: str) -> Row:
    """The row of a setting; of ``config.KEY``, that of a key which DeepSpeed keeps in ``config``."""
    key = name.removeprefix("config.")
    other = _OF_NUMBERS if key.startswith(_NUMBERS) else _OTHER
    return TABLE.get(name) or CONFIG.get(key) or CONFIG.get(key.partition(".")[0]) or other


def _without(
    engines: str, kind: str, effect: Effect, reason: str, nearest: str = "", *idle: Any,
    note: str = "it is so anyway", ddp: Field | None = None,
) -> Row:  # fmt: skip
    """No counterpart on ``engines``; ``idle``: values that ask for nothing, with ``note`` as the reason."""
    none: Any = unsupported(reason, nearest, "any", *idle, effect=effect, note=note)
    return replace(Row(kind=kind, ddp=ddp), **dict.fromkeys(engines.split(), none))


_ddp_only, _zero_only = partial(_without, "fsdp deepspeed"), partial(_without, "ddp fsdp")
_not_zero = partial(_without, "deepspeed", ddp=satisfied("nothing is sharded, so there is nothing to gather"))
_NO_FSDP = satisfied("FSDP is not the engine")
_STEP_PRECISION = "ShardPrecision(reduce=...)"
_BUCKET = "a collective is over a shard unit, not over a number of elements"
_FSDP_UNITS = "units: a number of parameters, or class names"
_PUBLIC_DDP = "only torch's DistributedDataParallel has it"
_PREFETCH = _not_zero(
    "count", "speed", "ZeRO-3 counts elements to gather ahead, not units",
    "stage3.prefetch_bucket_size, in elements, for both directions", 0, note="ZeRO-3 gathers ahead anyway",
)  # fmt: skip
_FSDP2_COMMUNICATION = _not_zero(
    "bool", "speed", "it is FSDP2's own communication", "nothing is lost but some speed", False,
    note="the communication of FSDP2 alone",
)  # fmt: skip
_BUCKET_DEFAULTS = "DeepSpeed's, or stock Lightning's, default"
_BUCKETS = _zero_only("any", "speed", _BUCKET, _FSDP_UNITS, 500_000_000, 200_000_000, note=_BUCKET_DEFAULTS)
_PINNED = "host memory is pinned on CUDA, and on CPU there is nothing to copy"


def _files(group: str, what: str, **defaults: Any) -> dict[str, Row]:
    """Rows of a group of offload; ``defaults``: DeepSpeed's of those that are of files alone."""
    rows = {f"{group}.pin_memory": _zero_only("bool", "memory", "", "", True, False, note=_PINNED)}
    for name, idle in {"nvme_path": "", **defaults}.items():
        reason = f"only ZeRO-3 keeps {what} in files"
        rows[f"{group}.{name}"] = _zero_only(type(idle).__name__, "memory", reason, "", idle)
    return rows


_OF_ALL = {
    "bool": "aligned log_grad_norm error_if_nonfinite save_frozen compile",
    "int": "trainer.accumulate_grad_batches trainer.num_nodes",
    "float": "timeout_seconds init_timeout_seconds",
    "str": "loss_weight_key process_group_backend resume_hyperparameters trainer.gradient_clip_algorithm "
    "trainer.accelerator",
    "any": "preemption async_save nonfinite lost_rank_seconds stuck_seconds sample_seeds activation_checkpointing "
    "trainer.gradient_clip_val trainer.devices",
}
"""Kind to the settings of it that all engines have, the Trainer's among them."""

TABLE: Mapping[str, Row] = {
    **{name: Row(kind=kind) for kind, names in _OF_ALL.items() for name in names.split()},
    # FSDP's.
    "units": _not_zero(
        "any", "memory", "ZeRO-3 gathers parameters module by module, as they are used, and has no units",
        "stage3.module_granularity_threshold; stage3.leaf_modules for mixture-of-experts blocks", "auto",
        note="stage 3 finds what to gather by itself",
    ),
    "forward_prefetch": _PREFETCH,
    "backward_prefetch": _PREFETCH,
    "separate_reduce_scatter": _FSDP2_COMMUNICATION,
    "symmetric_memory": _FSDP2_COMMUNICATION,
    "custom_all_gather": replace(_FSDP2_COMMUNICATION, kind="any"),
    "ignored_modules": _not_zero(
        "names", "memory", "ZeRO shards every parameter",
        "stage3.param_persistence_threshold: smaller parameters stay gathered",
    ),
    "forward_methods": Row(
        kind="names",
        ddp=unsupported("shard_ddp has no such argument", "run the model by forward"),
        deepspeed=satisfied("any method may run the model"),
    ),
    # DDP's.
    "find_unused_parameters": _not_zero(
        "bool", "numbers", "DeepSpeed refuses ranks that use different parameters in a step",
        "shard_fsdp; parameters that no step uses need no option", False, ddp=None,
    ),
    "static_graph": _ddp_only("bool", "speed", _PUBLIC_DDP, "nothing is lost but some speed", False),
    "gradient_as_bucket_view": _ddp_only("bool", "memory", "", "", False, True),
    "broadcast_buffers": _ddp_only(
        "bool", "numbers", "buffers are broadcast at each step's beginning", "shard_ddp in '32-true'", True,
    ),
    "bucket_cap_mb": _ddp_only("float", "speed", _BUCKET, "buckets.reduce with DeepSpeed, units with FSDP"),
    "comm_hook": _ddp_only("str", "numbers", _PUBLIC_DDP, f"{_STEP_PRECISION}, the same in 16 bits"),
    "comm_state": _ddp_only("any", "numbers", _PUBLIC_DDP),
    "start_method": _not_zero(
        "str", "speed", "the other processes run the script again", "popen", "popen", ddp=None
    ),
    "fsdp_version": Row(fsdp=satisfied("the engine is FSDP2 always"), ddp=_NO_FSDP, deepspeed=_NO_FSDP),
    # DeepSpeed's.
    **_files("offload_optimizer", "state", buffer_count=4),
    "offload_optimizer.fast_init": _zero_only("bool", "speed", "only ZeRO-3 keeps state in files", "", False),
    **_files("offload_parameters", "parameters", buffer_count=5, buffer_size=10**8, max_in_cpu=10**9),
    "buckets.reduce": _BUCKETS,
    "buckets.allgather": _BUCKETS,
    "buckets.overlap_comm": _zero_only(
        "bool", "speed", "communication always overlaps with compute", "", True, note="it always overlaps"
    ),
    "buckets.contiguous_gradients": _zero_only(
        "bool", "memory", "a unit's gradients are always copied into one buffer", "", True
    ),
    "buckets.reduce_scatter": _zero_only("bool", "speed", "a rank is only sent the sums of its own shards", "", True),
    "buckets.round_robin_gradients": _zero_only("bool", "speed", "gradients are sharded as parameters are", "", False),
    "stage3.prefetch_bucket_size": _zero_only(
        "any", "speed", "FSDP counts units to gather ahead, not elements", "forward_prefetch and backward_prefetch",
        50_000_000, note="DeepSpeed's default; FSDP gathers the next unit ahead",
    ),
    **dict.fromkeys(
        ("stage3.param_persistence_threshold", "stage3.model_persistence_threshold"),
        _zero_only(
            "any", "memory", "FSDP shards every parameter of a unit", "ignored_modules, by class name", 0, 100_000,
            note="DeepSpeed's default, or no parameter; FSDP shards all",
        ),
    ),
    **dict.fromkeys(
        ("stage3.max_live_parameters", "stage3.max_reuse_distance"),
        _zero_only(
            "int", "memory", "FSDP frees each unit after it has run; there is no limit to set", "units", 1_000_000_000,
            note="DeepSpeed's default",
        ),
    ),
    "stage3.sub_group_size": _zero_only(
        "int", "memory", "the optimizer steps all of a rank's shards at a time", "", 1_000_000_000, 1_000_000_000_000,
        note=_BUCKET_DEFAULTS,
    ),
    "stage3.module_granularity_threshold": _zero_only("int", "speed", "FSDP gathers by unit", _FSDP_UNITS, 0),
    "stage3.leaf_modules": _zero_only("names", "speed", "FSDP gathers by unit", "units with these classes"),
    "zero_plus_plus.quantized_weights": _zero_only(
        "bool", "numbers", "parameters are gathered in the compute dtype", "", False
    ),
    "zero_plus_plus.quantized_nontrainable_weights": _zero_only(
        "bool", "numbers", "frozen parameters keep their dtype", "", False
    ),
    "zero_plus_plus.quantized_gradients": _zero_only(
        "bool", "numbers", "gradients are reduced in fp32 or 16 bits", _STEP_PRECISION, False
    ),
}  # fmt: skip
"""Setting to its answers; those of DeepSpeed's further keys are in `CONFIG`."""

_EXPORT = satisfied("every checkpoint can be written so: `lightning-shard checkpoint export --dtype bf16`")
_CHECKPOINTING = unsupported(
    "the strategy does not call deepspeed.checkpointing.configure",
    "activation_checkpointing: units; or that call in configure_model", effect="memory",
)  # fmt: skip
_LOGS = satisfied("DeepSpeed's own prints; the Trainer logs by log_every_n_steps")
_BATCH_SIZE = satisfied("the batch size is the dataloader's: give it there")
_ANY_OPTIMIZER = _zero_only("any", "speed", "any optimizer runs", "", True, False)

CONFIG: Mapping[str, Row] = {
    "activation_checkpointing": Row(ddp=_CHECKPOINTING, fsdp=_CHECKPOINTING, deepspeed=_CHECKPOINTING),
    "fp16": _zero_only("any", "numbers", "a loss scale goes with precision 16-mixed", "ShardPrecision(loss_scale=...)"),
    "train_batch_size": Row(ddp=_BATCH_SIZE, fsdp=_BATCH_SIZE),
    "train_micro_batch_size_per_gpu": Row(ddp=_BATCH_SIZE, fsdp=_BATCH_SIZE),
    "steps_per_print": Row(ddp=_LOGS, fsdp=_LOGS),
    "zero_allow_untested_optimizer": _ANY_OPTIMIZER,
    "zero_force_ds_cpu_optimizer": _ANY_OPTIMIZER,
    "zero_optimization.allgather_partitions": _zero_only("any", "speed", "parameters are gathered by unit", "", True),
    "zero_optimization.load_from_fp32_weights": _zero_only("any", "numbers", "checkpoints have masters", "", True),
    "zero_optimization.ignore_unused_parameters": _zero_only(
        "any", "speed", "parameters without a gradient are always left alone", "", True
    ),
    "zero_optimization.elastic_checkpoint": _zero_only(
        "any", "speed", "checkpoints load at any number of processes", "", True, False
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Row(ddp=_EXPORT, fsdp=_EXPORT, deepspeed=_EXPORT),
    "data_types.grad_accum_dtype": _zero_only(
        "any", "numbers", "gradients are summed in the precision's own dtype", "precision, or an _aligned name",
        "fp32", "float32", "torch.float32", note="fp32 in every mixed precision",
    ),
}  # fmt: skip
"""Keys that stay in ``config`` under DeepSpeed and have an answer of their own elsewhere."""

_OTHER = _zero_only("any", "speed", "only DeepSpeed has it", "", False, note="it is off")
# Sections and keys without a row that change numbers; others are of speed, of memory or of what is printed.
_OF_NUMBERS = _zero_only("any", "numbers", "only DeepSpeed has it", "", False, note="it is off")
_NUMBERS = ("gradient_allreduce_op", "torch_autocast", "data_types", "zero_optimization.zenflow", "bf16.", "fp16.")
