"""The ``optimizer`` and ``scheduler`` sections: hyperparameters by their type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.zero.config.reading import AUTO, understood
from lightning_shard.text import nearest

ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "torch_adam", "adam_w_mode", "foreach")

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adam": (*ADAM, "fp32_optimizer_states"),
    "adamw": (*ADAM, "fp32_optimizer_states"),
    "adagrad": ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "amsgrad"),
    "lion": ("lr", "betas", "weight_decay", "fp32_optimizer_states"),
    "lamb": ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "max_coeff", "min_coeff"),
    "muon": (*ADAM, "momentum", "muon_lr", "adam_lr", "ns_method", "fp32_optimizer_states"),
    "muadam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "muadamw": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "musgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
"""DeepSpeed's own types, in lower case, and what each takes; any other is a class of torch.optim."""

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's own types; any other is a class of torch.optim.lr_scheduler."""

KINDS = {
    "lr": "float",
    "eps": "float",
    "weight_decay": "float",
    "momentum": "float",
    "muon_lr": "float",
    "adam_lr": "float",
    "bias_correction": "bool",
    "amsgrad": "bool",
    "torch_adam": "bool",
    "adam_w_mode": "bool",
    "fp32_optimizer_states": "bool",
    "nesterov": "bool",
    "warmup_min_lr": "float",
    "warmup_max_lr": "float",
    "warmup_num_steps": "int",
    "total_num_steps": "int",
    "warmup_min_ratio": "float",
    "cos_min_ratio": "float",
    "warmup_type": "str",
}
"""Kinds of hyperparameters; the others pass as they are."""


def read_sections(config: dict[str, Any], problems: list[str]) -> None:
    """Check the types and hyperparameters of both sections and put their values right, in place."""
    for name in ("optimizer", "scheduler"):
        section = config.get(name)
        if not section:
            config.pop(name, None)
            continue
        kind = section.get("type", AUTO)
        if kind == AUTO:
            problems.append(
                f"{name}.type is {section.get('type')!r}, but must name one. Name it, or remove the section "
                "and leave it to configure_optimizers"
            )
            continue
        params = section.get("params", {})
        if not isinstance(params, Mapping):
            problems.append(f"{name}.params is {params!r}, but must be a mapping")
            continue
        known = _optimizer_params(kind) if name == "optimizer" else _scheduler_params(kind)
        if known is None:
            problems.append(f"{name}.type is {kind!r}, which neither DeepSpeed nor torch has{_near_type(name, kind)}")
            continue
        section["params"] = _read_params(params, known, f"{name}.params", problems)


def _optimizer_params(kind: str) -> dict[str, bool] | None:
    import torch

    if kind.lower() in OPTIMIZERS:
        return dict.fromkeys(OPTIMIZERS[kind.lower()], False)
    cls = getattr(torch.optim, kind, None)
    known = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    return _arguments(cls) if known else None


def _scheduler_params(kind: str) -> dict[str, bool] | None:
    if kind in SCHEDULERS:
        from deepspeed.runtime import lr_schedules

        return _arguments(getattr(lr_schedules, kind))
    import torch

    cls = getattr(torch.optim.lr_scheduler, kind, None)
    return _arguments(cls) if inspect.isclass(cls) else None


def _arguments(cls: Any) -> dict[str, bool]:
    """Names of the constructor's arguments, and whether each must be given."""
    arguments = inspect.signature(cls).parameters.values()
    return {a.name: a.default is a.empty for a in arguments if a.name not in ("params", "optimizer")}


def _near_type(name: str, kind: str) -> str:
    names = [*OPTIMIZERS, "AdamW", "SGD"] if name == "optimizer" else [*SCHEDULERS, "CosineAnnealingLR"]
    return "".join(f": the nearest is {near!r}" for near in nearest(kind, names))


def _read_params(
    params: Mapping[str, Any], known: Mapping[str, bool], path: str, problems: list[str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in (key for key, required in known.items() if required):
        if params.get(key) is None or (params[key] == AUTO and key != "total_num_steps"):
            problems.append(f"{path}.{key} is {params.get(key)!r}, but this type needs it: write a value")
    for key, value in params.items():
        where = f"{path}.{key}"
        if key == "max_grad_norm":
            problems.append(f"{where} is {value!r}, but clipping is the Trainer's: set gradient_clip_val and remove it")
        elif key not in known:
            near = nearest(str(key), known)
            hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(known)}"
            problems.append(f"{where} is no hyperparameter of this type: {hint}")
        elif key == "betas" and value != AUTO:
            result[key] = _read_betas(value, where, problems)
        else:
            # DeepSpeed's schedulers take one rate per parameter group too.
            kind = "any" if isinstance(value, list) else KINDS.get(key, "any")
            read = understood(value, kind, where, problems)
            if read is not None:
                result[key] = read
    # DeepSpeed takes any other word for "log", and refuses 0 steps when it is too late.
    if result.get("warmup_type", AUTO) not in (AUTO, "log", "linear"):
        problems.append(f"{path}.warmup_type is {result['warmup_type']!r}, but must be 'log' or 'linear'")
    steps = result.get("warmup_num_steps", AUTO)
    if steps != AUTO and steps < 1:
        problems.append(f"{path}.warmup_num_steps is {steps}, but must be 1 or more")
    return result


def _read_betas(value: Any, where: str, problems: list[str]) -> list[float]:
    if not isinstance(value, list | tuple) or AUTO in value:
        problems.append(f"{where} is {value!r}, but must be 'auto' or a list of numbers")
        return []
    return [understood(beta, "float", f"{where}[{i}]", problems) for i, beta in enumerate(value)]
