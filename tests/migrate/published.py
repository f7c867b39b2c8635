"""DeepSpeed files of the kinds that public repositories hold: one line for each kind of content, put together anew."""

from __future__ import annotations

from typing import Any

AUTO = "auto"
AUTO_BATCH = {
    "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
}  # fmt: skip
BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
PRECISIONS: dict[str, dict[str, Any]] = {
    "auto": {"fp16": {"enabled": AUTO, **SCALE}, "bf16": {"enabled": AUTO}},
    "auto_fp16": {"fp16": {"enabled": AUTO, **SCALE, "auto_cast": False}},
    "bf16": {"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2}},
    "fp16": {"fp16": {"enabled": True, **SCALE}},
    "fp32": {"fp16": {"enabled": False}},
    "named_bfloat16": {"bfloat16": {"enabled": "auto"}},
}
HOST = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True, "reduce_scatter": True,
    "reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True,
}  # fmt: skip
STAGE_3 = {
    "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1, "overlap_comm": True},
    "zero1_other_buckets": {"stage": 1, "reduce_bucket_size": 5e7, "overlap_comm": False},
    "zero2": {"stage": 2, **BUCKETS},
    "zero2_small_buckets": {"stage": 2, **BUCKETS, "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8},
    "zero2_offload": {"stage": 2, **BUCKETS, "offload_optimizer": HOST},
    "zero2_old_offload": {"stage": 2, "cpu_offload": True, "contiguous_gradients": True},
    "zero3": {"stage": 3, **STAGE_3},
    "zero3_offload": {"stage": 3, **STAGE_3, "offload_optimizer": HOST, "offload_param": HOST},
    "zero3_offload_optimizer": {"stage": 3, **STAGE_3, "offload_optimizer": {**HOST, "buffer_count": 4}},
    "zero3_numbers": {
        "stage": 3, "stage3_max_live_parameters": 3e7, "stage3_max_reuse_distance": 3e7, "sub_group_size": 1e8,
        "stage3_prefetch_bucket_size": 3e7, "stage3_param_persistence_threshold": 1e4, "memory_efficient_linear": False,
        "stage3_gather_fp16_weights_on_model_save": True,
    },
    "zero3_none": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}},
    "zero3_hpz": {"stage": 3, "zero_hpz_partition_size": 8, "contiguous_gradients": True},
}  # fmt: skip
ADAM = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
AUTO_ADAM = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
AUTO_PARAMS = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
AUTO_WARMUP = {"type": "WarmupLR", "params": AUTO_PARAMS}
AUTO_DECAY = {"type": "WarmupDecayLR", "params": {**AUTO_PARAMS, "total_num_steps": AUTO}}
CHECKPOINTED = {"partition_activations": True, "cpu_checkpointing": False, "contiguous_memory_optimization": False}
PROFILED = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True}
MONITORED = {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"}, "wandb": {"enabled": False}}


def files() -> dict[str, dict[str, Any]]:
    """Name to content."""
    found = {}
    for name, zero in ZERO.items():
        # As with a Trainer that fills in the rest.
        for precision in ("auto", "bf16", "fp16") if "numbers" not in name else ("auto_fp16", "named_bfloat16"):
            content = {**PRECISIONS[precision], "zero_optimization": zero, **AUTO_BATCH, "steps_per_print": 2000}
            found[f"{name}_{precision}"] = {**content, "wall_clock_breakdown": False}
    with_optimizer = {"optimizer": AUTO_ADAM, "scheduler": AUTO_WARMUP}
    for name in ("zero2", "zero2_offload", "zero3", "zero3_offload"):
        base = {**PRECISIONS["auto"], "zero_optimization": ZERO[name], **AUTO_BATCH}
        found[f"{name}_optimizer"] = {**base, **with_optimizer, "wall_clock_breakdown": False}
        found[f"{name}_decay"] = {**base, "optimizer": AUTO_ADAM, "scheduler": AUTO_DECAY, "steps_per_print": "inf"}
        # As an example script runs it by itself.
        alone = {**BATCH, **PRECISIONS["bf16"], "zero_optimization": ZERO[name], "gradient_clipping": 1.0}
        found[f"{name}_alone"] = {**alone, "optimizer": ADAM, "steps_per_print": 10, "prescale_gradients": False}
        found[f"{name}_profiled"] = {**alone, "flops_profiler": PROFILED, "comms_logger": {"enabled": False}}
        found[f"{name}_monitored"] = {**alone, **MONITORED, "wall_clock_breakdown": True}
        found[f"{name}_checkpointed"] = {**alone, "activation_checkpointing": CHECKPOINTED}
    found["untested_optimizer"] = {
        "zero_allow_untested_optimizer": True,
        **AUTO_BATCH,
        "zero_optimization": ZERO["zero2"],
    }
    found["no_section"] = {**BATCH, **PRECISIONS["fp16"], "gradient_clipping": 1.0, "steps_per_print": 100}
    found["no_section_fp32"] = {**BATCH, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **PRECISIONS["fp32"]}
    found["stage_0"] = {**AUTO_BATCH, "zero_optimization": {"stage": 0, **BUCKETS}, **PRECISIONS["auto"]}
    found["old_stage_1"] = {**BATCH, "zero_optimization": True, **PRECISIONS["fp16"]}
    # What is not carried over: a schedule of DeepSpeed's with numbers.
    warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000}}
    found["warmup_in_numbers"] = {**BATCH, "zero_optimization": ZERO["zero2"], "optimizer": ADAM, "scheduler": warmup}
    return found
