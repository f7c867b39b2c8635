"""A user's settings of DeepSpeed: typed fields over ``config``, checked before any process is started."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from torch.optim import Adagrad, Optimizer

from lightning_shard.engines.engine import PlannedRun
from lightning_shard.engines.zero.config import fields as typed
from lightning_shard.engines.zero.config.reading import (
    AUTO,
    canonical_config,
    read_config,
    read_sections,
    set_value,
    value_at,
)
from lightning_shard.errors import ConfigurationError, PrecisionError
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.policy import short

SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")

RULE = "The DeepSpeed configuration can't be used"

DEFAULT_STAGE = 2  # As in stock Lightning.

ZERO = "zero_optimization"

_GROUPS: tuple[tuple[type, str, str], ...] = (
    (typed.OptimizerOffload, "offload_optimizer", "offload_optimizer."),
    (typed.ParameterOffload, "offload_parameters", "offload_param."),
    (typed.ZeroBuckets, "buckets", ""),
    (typed.Stage3Options, "stage3", "stage3_"),
    (typed.ZeroPlusPlus, "zero_plus_plus", "zero_"),
)
"""Class of a typed group, its name, and the prefix of its keys in DeepSpeed."""

_OTHERS = {
    "buckets.reduce": "reduce_bucket_size",
    "buckets.allgather": "allgather_bucket_size",
    "stage3.sub_group_size": "sub_group_size",
    "stage3.leaf_modules": "leaf_module.classes",
}

KEYS = {
    "stage": f"{ZERO}.stage",
    **{
        f"{group}.{f.name}": f"{ZERO}.{_OTHERS.get(f'{group}.{f.name}', prefix + f.name)}"
        for options, group, prefix in _GROUPS
        for f in dataclasses.fields(options)
    },
    "communication_data_type": "communication_data_type",
}
"""Typed field to DeepSpeed's key, both with dots."""


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Checked settings, made by `read_settings`."""

    fields: typed.DeepSpeedFields
    merged: Mapping[str, Any]  # Fields and ``config`` in DeepSpeed's keys, in one spelling, "auto" not yet replaced.

    @property
    def stage(self) -> int:
        """1 to 3, or 0 from a file, which is refused later."""
        stage: int = value_at(self.merged, f"{ZERO}.stage")
        return stage

    @property
    def optimizer_device(self) -> Literal["none", "cpu", "nvme"]:
        """The memory of optimizer state. "none": the device that computes."""
        return value_at(self.merged, f"{ZERO}.offload_optimizer.device") or "none"

    @property
    def communication_data_type(self) -> str | None:
        """The dtype in which gradients are reduced, "fp32", "bf16" or "fp16". None: the precision policy's."""
        dtype = value_at(self.merged, "communication_data_type")
        return None if dtype == AUTO else dtype

    @property
    def loss_scaling(self) -> LossScaling | None:
        """See `loss_scaling_of`."""
        return loss_scaling_of(self.merged.get("fp16", {}))

    @property
    def counts_steps(self) -> bool:
        """Whether a schedule needs the number of steps of the fit."""
        return bool(value_at(self.merged, "scheduler.params.total_num_steps") == AUTO)


def read_settings(fields: typed.DeepSpeedFields, *, aligned: bool, problems: list[str]) -> ZeroSettings:
    """Check ``fields``. Appends to ``problems`` a line with its path for each value that can work in no run."""
    settings = ZeroSettings(fields=fields, merged=canonical_config(_merge_fields(fields, problems), problems))
    if not problems:
        _check_stage(settings, problems)
        try:
            _ = settings.loss_scaling
        except ConfigurationError as error:
            problems.append(str(error).rstrip("."))
        if aligned:
            _check_contract(settings.merged, problems)
    return settings


def _merge_fields(fields: typed.DeepSpeedFields, problems: list[str]) -> dict[str, Any]:
    """See `ZeroSettings.merged`."""
    merged = canonical_config(read_config(fields.config), problems)
    if not problems:
        read_sections(merged, problems)
    for name, path in KEYS.items():
        unset = getattr(fields, name.partition(".")[0]) is None
        value = None if unset else attrgetter(name)(fields)
        if value is None:
            continue
        there = value_at(merged, path)
        if there not in (None, AUTO) and there != value:
            problems.append(
                f"{name} is {value!r}, but config's {path} is {there!r}: remove one of the two, or make them equal"
            )
        set_value(merged, path, copy.copy(value))
    for section in ("offload_optimizer", "offload_param"):
        if value_at(merged, f"{ZERO}.{section}.device") in (None, AUTO, "none"):
            merged.get(ZERO, {}).pop(section, None)
    if value_at(merged, f"{ZERO}.stage") in (None, AUTO):
        set_value(merged, f"{ZERO}.stage", DEFAULT_STAGE)
    return merged


def check_optimizers(settings: ZeroSettings, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that DeepSpeed can't step (ConfigurationError)."""
    returned = f"configure_optimizers returns {len(optimizers) or 'no'} optimizers"
    if len(optimizers) > 1 and settings.optimizer_device == "nvme":
        raise ConfigurationError(f"{returned}, but with offload to NVMe DeepSpeed steps one. Use device: cpu.")
    if len(optimizers) > 1 and "scheduler" in settings.merged:
        raise ConfigurationError(
            f"{returned}, but the DeepSpeed configuration has a scheduler section, which does not say whose learning "
            "rate it sets. Return schedules from configure_optimizers, and remove the section."
        )
    section = value_at(settings.merged, "optimizer.type") if not optimizers else None
    is_adagrad = len(optimizers) == 1 and isinstance(optimizers[0], Adagrad)
    if is_adagrad or (str(section).lower() == "adagrad" and settings.optimizer_device == "none"):
        raise ConfigurationError(
            "The optimizer is torch's Adagrad, in whose place DeepSpeed puts one of its own with default "
            "hyperparameters. Use shard_fsdp or shard_ddp, or DeepSpeedCPUAdagrad with offload_optimizer."
        )
    if not optimizers and section is None:
        raise ConfigurationError(
            f"{returned}, and the DeepSpeed configuration has no optimizer section. Return an optimizer, or write the "
            "section: optimizer: {type: AdamW, params: {lr: 1.0e-4}}."
        )


def loss_scaling_of(fp16: Mapping[str, Any]) -> LossScaling | None:
    """Read the loss scale of a canonical ``fp16`` section, with DeepSpeed's defaults. None: the section sets none.
    ConfigurationError: a static scale, a hysteresis refilled by each good step, a minimum that is no power of two.
    """
    given = {key: value for key, value in fp16.items() if value != AUTO}
    if given.get("enabled") is False:
        return None
    for key in ("consecutive_hysteresis", "loss_scale"):
        if given.get(key):
            raise ConfigurationError(
                f"fp16.{key} is {given[key]}, but on every engine here the loss scale is dynamic, and its hysteresis is"
                " refilled when it grows. Remove it, or begin at a scale by fp16.initial_scale_power."
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


def _check_stage(asked: ZeroSettings, problems: list[str]) -> None:
    """Check combinations that DeepSpeed would ignore, or fail on late."""
    stage, zero = asked.stage, asked.merged[ZERO]
    for name, key in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")):
        section = zero.get(key, {})
        device = section.get("device", "none")
        if stage < 3 and (device == "nvme" or (device == "cpu" and key == "offload_param")):
            problems.append(f"{name} is {device!r} with stage {stage}, but needs stage 3. Set stage: 3, or remove it")
        if device == "nvme" and section.get("nvme_path") in (None, AUTO):
            problems.append(f"{name} is 'nvme' without nvme_path. Set {name}.nvme_path to a directory")
        for pipeline in ("pipeline_read", "pipeline_write"):
            if device == "nvme" and section.get(pipeline) is True:
                # DeepSpeed's other swapper writes while the next sub-group is stepped. State is read between steps.
                problems.append(f"{ZERO}.{key}.{pipeline} is true, but state in files is used between steps. Remove it")
    autocast = asked.merged.get("torch_autocast", {})
    if stage == 3 and autocast.get("enabled") is True and autocast.get("dtype", AUTO) == AUTO:
        problems.append(
            "torch_autocast.enabled is true with stage 3, which gathers in torch_autocast.dtype. Set it too"
        )
    for path in (f"zero_{field.name}" for field in dataclasses.fields(typed.ZeroPlusPlus)):
        value = zero.get(path, AUTO)
        if stage < 3 and value != AUTO and (value is True or value > 1):
            problems.append(f"{ZERO}.{path} is {value} with stage {stage}, but ZeRO++ needs stage 3. Set stage: 3")
    for path, (refused, reason) in TRAINER_OWNED.items():
        if value_at(asked.merged, path) is refused:
            problems.append(f"{path} is {str(refused).lower()}, but {reason}. Remove it")
    if value_at(asked.merged, "fp16.enabled") is True and value_at(asked.merged, "bf16.enabled") is True:
        problems.append("fp16.enabled and bf16.enabled are both true, but a run computes in one of them")


TRAINER_OWNED = {
    "managed_gradient_accumulation": (False, "the strategy sets it by the Trainer's accumulate_grad_batches"),
    "dataloader_drop_last": (True, "the Trainer has its own dataloader: set drop_last there"),
    "compile.deepcompile": (True, "DeepCompile needs DeepSpeed's own compile call"),
    "checkpoint.load_universal": (True, "checkpoints are this package's own, which load at any world size"),
    f"{ZERO}.zero_quantized_nontrainable_weights": (
        True,
        "DeepSpeed 0.19 copies frozen parameters into int8 without scaling them, by which most become 0",
    ),
}
"""Key to the refused value, and the reason."""

CONTRACT: dict[str, tuple[tuple[Any, ...], str]] = {
    "communication_data_type": (("fp32",), "gradients are reduced in fp32"),
    "data_types.grad_accum_dtype": (("fp32", "float32", "torch.float32"), "gradients are summed in fp32"),
    "data_types.buffer_dtype": ((), "each buffer keeps the dtype that the model gave it"),
    f"{ZERO}.memory_efficient_linear": ((False,), "it replaces torch.nn.functional.linear for the whole process"),
    f"{ZERO}.round_robin_gradients": ((False,), "it changes which rank sums which gradients"),
    f"{ZERO}.zero_quantized_weights": ((False,), "parameters are gathered in the compute dtype"),
    f"{ZERO}.zero_quantized_gradients": ((False,), "gradients are reduced in fp32"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_optimizer_states": ((False,), "optimizer state is fp32"),
    "bf16.check_grad_overflow": ((False,), "no engine skips a step in bf16"),
    "gradient_predivide_factor": ((1.0,), "gradients are summed, then divided"),
    "prescale_gradients": ((False,), "gradients are summed, then divided"),
    "gradient_allreduce_op": (("mean",), "gradients are averaged"),
    "torch_autocast.enabled": ((False,), "entire modules are cast on every engine"),
}
"""Key to the values that the aligned contract allows, the first of them pinned, and its rule."""


def _check_contract(merged: Mapping[str, Any], problems: list[str]) -> None:
    for path, (allowed, rule) in CONTRACT.items():
        value = value_at(merged, path)
        compared = value.lower() if isinstance(value, str) else value
        if value in (None, AUTO) or compared in allowed:
            continue
        fix = f"Set it to {allowed[0]!r} or remove it" if allowed else "Remove it"
        problems.append(f"{path} is {value!r} under aligned, but the contract is: {rule}. {fix}")


def check_policy(asked: ZeroSettings, run: PlannedRun) -> None:
    """Refuse a precision that DeepSpeed can't do with these settings, before training (PrecisionError)."""
    policy = run.policy
    low_fp16 = policy.is_low_memory and short(policy.master) == "fp16"
    if low_fp16 and asked.optimizer_device == "none":
        raise PrecisionError(
            f"masters are fp16 with DeepSpeed stage {asked.stage}, but DeepSpeed keeps fp16 masters only with the "
            "optimizer offloaded, under DeepSpeedCPUAdam. Use shard_deepspeed_stage_2_offload or "
            "_3_offload, an _aligned name, or '16-mixed'."
        )
