"""What can be refused when a strategy is built, before any process is started."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import LBFGS, Optimizer

from lightning_shard.engines.engine import PlannedRun
from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.engines.zero.config.keys import Section, known_keys
from lightning_shard.engines.zero.config.merging import ZERO, Effective, effective, merge
from lightning_shard.engines.zero.config.reading import AUTO, get
from lightning_shard.errors import ConfigurationError, PrecisionError, raise_problems
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.policy import short

SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")

RULE = "The DeepSpeed configuration can't be used"


def check_fields(fields: DeepSpeedFields, aligned: bool) -> None:
    """Refuse everything that can't work whatever the run is: one ConfigurationError with all problems' paths."""
    problems: list[str] = []
    merged = merge(fields, problems)
    _check_by_models(merged, known_keys(), "", problems)
    if not problems:
        _check_stage(merged, problems)
        _check_trainer_owned(merged, problems)
        try:
            loss_scaling_of(merged.get("fp16", {}))
        except ConfigurationError as error:
            problems.append(str(error).rstrip("."))
        if aligned:
            _check_contract(merged, problems)
    raise_problems(problems, RULE)


def check_optimizers(fields: DeepSpeedFields, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what ``configure_optimizers`` makes where DeepSpeed can't step it (ConfigurationError)."""
    merged = merge(fields, [])
    settings = effective(merged)
    if len(optimizers) > 1 and (settings.stage == 0 or settings.optimizer_device == "nvme"):
        where = "in stage 0" if settings.stage == 0 else "with the optimizer offloaded to NVMe"
        raise ConfigurationError(
            f"configure_optimizers returns {len(optimizers)} optimizers, but DeepSpeed's engine steps one {where}. "
            "Use another stage without NVMe, or shard_ddp."
        )
    if len(optimizers) > 1 and "scheduler" in merged:
        raise ConfigurationError(
            f"configure_optimizers returns {len(optimizers)} optimizers, but the DeepSpeed configuration has a "
            "scheduler section, which does not say whose learning rate it sets. Return schedules from "
            "configure_optimizers, and remove the section."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigurationError(
            "configure_optimizers returns LBFGS, which evaluates the loss several times in a step, but DeepSpeed's "
            "engine steps without a closure. Use another optimizer, or shard_ddp."
        )
    if not optimizers and not settings.has_optimizer:
        raise ConfigurationError(
            "configure_optimizers returns none, and the DeepSpeed configuration has no optimizer section. Return "
            "an optimizer, or write the section: optimizer: {type: AdamW, params: {lr: 1.0e-4}}."
        )


def loss_scaling_of(fp16: Mapping[str, Any]) -> LossScaling | None:
    """The loss scale of an ``fp16`` section in canonical form, with DeepSpeed's own defaults; None: it says nothing.
    ConfigurationError: a static scale, a hysteresis refilled by each good step, a minimum that is no power of two.
    """
    given = {key: value for key, value in fp16.items() if value != AUTO}
    if given.get("enabled") is False:
        return None
    if given.get("consecutive_hysteresis"):
        raise ConfigurationError(
            "fp16.consecutive_hysteresis is true, but the loss scale's hysteresis is refilled only when the scale "
            "grows. Remove it."
        )
    static = given.get("loss_scale", 0)
    if static != 0:
        power = max(0, round(math.log2(static))) if static > 0 else 16
        raise ConfigurationError(
            f"fp16.loss_scale is {static:g}, a static scale, but the scale is dynamic on every engine here. Set "
            f"fp16.loss_scale to 0 and fp16.initial_scale_power to {power}, to begin at {2.0**power:g}."
        )
    if not any(key in given for key in SCALE_KEYS):
        return None
    try:
        return LossScaling(
            initial=math.ldexp(1.0, given.get("initial_scale_power", 16)),
            growth_interval=given.get("loss_scale_window", 1000),
            hysteresis=given.get("hysteresis", 2),
            minimum=float(given.get("min_loss_scale", 1)),
        )
    except (PrecisionError, OverflowError) as error:
        shown = ", ".join(f"{key} {given[key]!r}" for key in SCALE_KEYS if key in given)
        raise ConfigurationError(f"The fp16 section ({shown}) can't be used: {error}") from error


def _check_by_models(content: dict[str, Any], section: Section, path: str, problems: list[str]) -> None:
    """Let DeepSpeed's own models check values: ranges, and words of which there are a few."""
    from pydantic import ValidationError

    for key, kind in section.keys.items():
        if isinstance(kind, Section) and isinstance(content.get(key), dict):
            _check_by_models(content[key], kind, f"{path}{key}.", problems)
    if section.model is None:
        return
    # Nested sections have been checked for themselves.
    plain = {k: v for k, v in content.items() if not isinstance(v, dict) and v != AUTO}
    try:
        section.model(**plain)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(map(str, detail["loc"][:1]))
            where = f"{path}{key} is {content.get(key)!r}" if key else f"{path.rstrip('.')} does not fit"
            problems.append(f"{where}, but DeepSpeed's rule is: {detail['msg']}")


def _check_stage(merged: dict[str, Any], problems: list[str]) -> None:
    asked = effective(merged)
    stage, zero = asked.stage, merged[ZERO]
    if asked.parameter_device != "none" and stage < 3:
        problems.append(
            f"offload_parameters is {asked.parameter_device!r} with stage {stage}, but only stage 3 shards, and so can "
            "offload, parameters. Set stage: 3, or remove it"
        )
    if asked.optimizer_device != "none" and stage == 0:
        problems.append(
            f"offload_optimizer is {asked.optimizer_device!r} with stage 0, but only stages 1 to 3 shard, and so can "
            "offload, optimizer state. Set stage: 1 or more, or remove it"
        )
    for name, key in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")):
        section = zero.get(key, {})
        if section.get("device") != "nvme":
            continue
        if stage < 3:
            problems.append(f"{name} is 'nvme' with stage {stage}, but NVMe needs stage 3. Set stage: 3 or device: cpu")
        if section.get("nvme_path") in (None, AUTO):
            problems.append(f"{name} is 'nvme' without nvme_path. Set {name}.nvme_path to a directory")
        for pipeline in ("pipeline_read", "pipeline_write"):
            if section.get(pipeline) is True:
                # DeepSpeed's other swapper writes while the next sub-group is stepped; state is read between steps.
                problems.append(f"{ZERO}.{key}.{pipeline} is true, but state in files is used between steps. Remove it")
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if zero.get(key) is True and stage < 3:
            problems.append(f"{ZERO}.{key} is true with stage {stage}, but ZeRO++ needs stage 3. Set stage: 3")
    hpz = zero.get("zero_hpz_partition_size", 1)
    if hpz not in (0, 1, AUTO) and stage < 3:
        problems.append(f"{ZERO}.zero_hpz_partition_size is {hpz} with stage {stage}, but hpZ needs stage 3")
    # `deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py` assert it.
    if stage > 1 and zero.get("reduce_scatter") is not False:
        for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if (value := merged.get(key)) not in (None, AUTO, plain):
                problems.append(
                    f"{key} is {str(value).lower()} with stage {stage}, but DeepSpeed divides gradients after their "
                    "reduce-scatter there. Remove it, for the same mean, or set buckets.reduce_scatter: false"
                )
    ratio = get(merged, f"{ZERO}.offload_optimizer.ratio")
    if ratio not in (None, AUTO) and ratio < 1 and stage < 3:
        problems.append(f"offload_optimizer.ratio is {ratio} with stage {stage}, but a part needs stage 3")


def _check_trainer_owned(merged: dict[str, Any], problems: list[str]) -> None:
    """What DeepSpeed would do itself but the Trainer or the strategy does here."""
    for path, (refused, reason) in TRAINER_OWNED.items():
        if get(merged, path) is refused:
            problems.append(f"{path} is {str(refused).lower()}, but {reason}. Remove it")
    if get(merged, "fp16.enabled") is True and get(merged, "bf16.enabled") is True:
        problems.append("fp16.enabled and bf16.enabled are both true, but a run computes in one of them")
    for path, least in _LEAST.items():
        value = merged.get(path, AUTO)
        if value != AUTO and value < least:
            problems.append(f"{path} is {value:g}, but must be {least} or more")
    for path, allowed in _WORDS.items():
        value = get(merged, path)
        if isinstance(value, str) and value != AUTO and value.lower() not in allowed:
            problems.append(f"{path} is {value!r}, but must be one of {', '.join(allowed)}")


TRAINER_OWNED = {
    "managed_gradient_accumulation": (False, "the strategy sets it by the Trainer's accumulate_grad_batches"),
    "dataloader_drop_last": (True, "the Trainer has its own dataloader: set drop_last there"),
    "compile.deepcompile": (True, "DeepCompile needs DeepSpeed's own compile call"),
    "checkpoint.load_universal": (True, "checkpoints are this package's own, which load at any world size"),
}
"""Key to the value that can't be had, and the reason."""

_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_LEAST = {"gradient_clipping": 0, **dict.fromkeys(_COUNTS, 1)}

_DTYPES = ("fp32", "bf16", "fp16")
_DTYPE_WORDS = (*_DTYPES, "float32", "bfloat16", "float16", "torch.float32", "torch.bfloat16", "torch.float16", "half")

_WORDS = {
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "gradient_allreduce_op": ("mean", "sum"),
    "data_types.grad_accum_dtype": _DTYPE_WORDS,
    "data_types.param_dtype": _DTYPE_WORDS,
    "data_types.buffer_dtype": _DTYPE_WORDS,
    "torch_autocast.dtype": _DTYPE_WORDS,
    "checkpoint.tag_validation": ("warn", "ignore", "fail"),
}

CONTRACT: dict[str, tuple[tuple[Any, ...], str]] = {
    "communication_data_type": (("fp32",), "gradients are reduced in fp32"),
    "data_types.grad_accum_dtype": (("fp32", "float32", "torch.float32"), "gradients are summed in fp32"),
    "data_types.buffer_dtype": ((), "each buffer keeps the dtype that the model gave it"),
    f"{ZERO}.memory_efficient_linear": ((False,), "it replaces torch.nn.functional.linear for the whole process"),
    f"{ZERO}.round_robin_gradients": ((False,), "it changes which rank sums which gradients"),
    f"{ZERO}.zero_quantized_weights": ((False,), "parameters are gathered in the compute dtype"),
    f"{ZERO}.zero_quantized_nontrainable_weights": ((False,), "parameters are kept in the dtype they were loaded in"),
    f"{ZERO}.zero_quantized_gradients": ((False,), "gradients are reduced in fp32"),
    f"{ZERO}.zenflow": ((), "every gradient is used in the step that it belongs to"),
    f"{ZERO}.offload_optimizer.super_offload": ((False,), "the optimizer is the one that was configured"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_optimizer_states": ((False,), "optimizer state is fp32"),
    "bf16.check_grad_overflow": ((False,), "no engine skips a step in bf16"),
    "gradient_predivide_factor": ((1.0,), "gradients are summed, then divided"),
    "prescale_gradients": ((False,), "gradients are summed, then divided"),
    "gradient_allreduce_op": (("mean",), "gradients are averaged"),
    "torch_autocast.enabled": ((False,), "entire modules are cast on every engine"),
}
"""Key to the values that the aligned contract allows, and the rule that others break."""


def _check_contract(merged: dict[str, Any], problems: list[str]) -> None:
    for path, (allowed, rule) in CONTRACT.items():
        value = get(merged, path)
        compared = value.lower() if isinstance(value, str) else value
        if value in (None, AUTO) or compared in allowed:
            continue
        fix = f"Set it to {allowed[0]!r} or remove it" if allowed else "Remove it"
        problems.append(f"{path} is {value!r} under aligned, but the contract is: {rule}. {fix}")


def check_policy(asked: Effective, run: PlannedRun) -> None:
    """Refuse a precision that DeepSpeed can't do with these settings, before training (PrecisionError)."""
    policy = run.policy
    if asked.stage == 0 and short(policy.compute) != "fp32":
        raise PrecisionError(
            f"precision is {run.precision!r} with DeepSpeed stage 0, which sums and reduces gradients in 16 bits "
            f"there. Use shard_ddp{'_aligned' if run.aligned else ''}, which replicates everything as well and runs "
            "every precision, or '32-true'."
        )
    low_fp16 = policy.is_low_memory and short(policy.master) == "fp16"
    if low_fp16 and asked.optimizer_device == "none":
        raise PrecisionError(
            f"masters are fp16 with DeepSpeed stage {asked.stage}, but DeepSpeed keeps fp16 masters only with the "
            "optimizer offloaded, under DeepSpeedCPUAdam. Use shard_deepspeed_stage_2_offload or "
            "_3_offload, an _aligned name, or '16-mixed'."
        )
