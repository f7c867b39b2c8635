"""The ``optimizer`` and ``scheduler`` sections: hyperparameters by their type, "auto" ones from what the run knows."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from lightning_shard.engines.zero.config.fields import RunFacts
from lightning_shard.engines.zero.config.reading import AUTO, get, put, understood
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

ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
"""Types that older versions of DeepSpeed had, which compress what they communicate."""

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's own types; any other is a class of torch.optim.lr_scheduler."""

KINDS = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr"), "float"),
    **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio"), "float"),
    **dict.fromkeys(("bias_correction", "amsgrad", "torch_adam", "adam_w_mode", "nesterov"), "bool"),
    "fp32_optimizer_states": "bool",
    "warmup_num_steps": "int",
    "total_num_steps": "int",
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
        kind, params = section.get("type", AUTO), section.get("params", {})
        if kind == AUTO:
            problems.append(
                f"{name}.type is {section.get('type')!r}, but must name one. Name it, or remove the section "
                "and leave it to configure_optimizers"
            )
        elif not isinstance(params, Mapping):
            problems.append(f"{name}.params is {params!r}, but must be a mapping")
        elif (known := known_params(name, kind)) is None:
            names = [*OPTIMIZERS, "AdamW", "SGD"] if name == "optimizer" else [*SCHEDULERS, "CosineAnnealingLR"]
            hint = "".join(f": the nearest is {near!r}" for near in nearest(kind, names))
            why = "which neither DeepSpeed nor torch has"
            if name == "optimizer" and str(kind).lower() in ONE_BIT:
                why = "which DeepSpeed has removed"
            problems.append(f"{name}.type is {kind!r}, {why}{hint}")
        else:
            section["params"] = _read_params(params, known, f"{name}.params", problems)


def known_params(section: str, kind: str) -> dict[str, bool] | None:
    """Names of the hyperparameters of a type, and whether each must be given; None for a type that there is not."""
    found: Any = getattr(torch.optim if section == "optimizer" else torch.optim.lr_scheduler, kind, None)
    if section == "optimizer" and kind.lower() in OPTIMIZERS:
        return dict.fromkeys(OPTIMIZERS[kind.lower()], False)
    if section == "scheduler" and kind in SCHEDULERS:
        from deepspeed.runtime import lr_schedules

        found = getattr(lr_schedules, kind)
    if not inspect.isclass(found) or (section == "optimizer" and not issubclass(found, torch.optim.Optimizer)):
        return None
    arguments = inspect.signature(found).parameters.values()
    return {a.name: a.default is a.empty for a in arguments if a.name not in ("params", "optimizer")}


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


def differ(config: dict[str, Any], path: str, value: Any, whose: str, problems: list[str]) -> None:
    """A problem where ``config`` has another value than the run at ``path``; nothing there, or "auto", is none."""
    given = get(config, path)
    if given not in (None, AUTO) and given != value:
        problems.append(f"{path} is {given!r}, but {whose} is {value!r}")


def _fill(config: dict[str, Any], path: str, value: Any, whose: str, problems: list[str]) -> None:
    differ(config, path, value, whose, problems)
    if get(config, path) == AUTO:
        put(config, path, value)


def resolve_sections(config: dict[str, Any], facts: RunFacts, problems: list[str]) -> None:
    """Fill in the "auto" values of both sections in place; a number that the run contradicts is a problem."""
    optimizer = facts.optimizer or {}
    known = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.items() if v is not None}
    if "optimizer" in config:
        _optimizer(config, known, problems)
        _adam(config["optimizer"], facts)
    if "scheduler" in config:
        _scheduler(config, facts, known, problems)


def _optimizer(config: dict[str, Any], known: dict[str, Any], problems: list[str]) -> None:
    kind, existing = config["optimizer"]["type"], known.get("type")
    # Adam is DeepSpeed's name of AdamW too, unless ``adam_w_mode`` is off.
    word = "adam" if kind.lower() == "adamw" else kind.lower()
    if existing is not None and word not in existing.lower():
        problems.append(
            f"optimizer.type is {kind!r}, but configure_optimizers returns {existing}: remove the section, or return "
            "no optimizer"
        )
    for key in ("lr", "betas", "eps", "weight_decay"):
        if key in known:
            _fill(config, f"optimizer.params.{key}", known[key], "the optimizer's", problems)
    if get(config, "optimizer.params.lr") == AUTO:
        problems.append(
            "optimizer.params.lr is 'auto', but no learning rate is known: write a number, or return the optimizer "
            "from configure_optimizers"
        )


def _adam(section: dict[str, Any], facts: RunFacts) -> None:
    """Which of its three Adams DeepSpeed builds, where the section does not say: under the contract torch's, since its
    own kernels round otherwise; in low memory the CPU's with moments in the masters' dtype.
    """
    if section["type"].lower() not in ("adam", "adamw"):
        return
    params = section["params"]
    if facts.aligned and params.get("bias_correction", True) in (True, AUTO):
        # torch's has no such argument, and always does it.
        params.pop("bias_correction", None)
        params.setdefault("torch_adam", True)
    if facts.policy.is_low_memory and not params.get("torch_adam"):
        params.setdefault("fp32_optimizer_states", False)


def _scheduler(config: dict[str, Any], facts: RunFacts, known: dict[str, Any], problems: list[str]) -> None:
    rate = known.get("lr", get(config, "optimizer.params.lr"))
    # DeepSpeed refuses 0 warm-up steps, Hugging Face's default.
    for key, least in (("warmup_num_steps", 1), ("warmup_min_lr", 0)):
        if get(config, f"scheduler.params.{key}") == AUTO:
            put(config, f"scheduler.params.{key}", least)
    sources = {
        "total_num_steps": (facts.total_steps, "the Trainer's number of optimizer steps"),
        "warmup_max_lr": (None if rate == AUTO else rate, "the optimizer's learning rate"),
    }
    for key, (value, whose) in sources.items():
        path = f"scheduler.params.{key}"
        if value is not None:
            _fill(config, path, value, whose, problems)
        elif get(config, path) == AUTO:
            problems.append(f"{path} is 'auto', but {whose} is not known: write a number")
