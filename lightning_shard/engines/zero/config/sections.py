"""The ``optimizer`` and ``scheduler`` sections: hyperparameters by their type, "auto" ones from what the run knows."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_shard.engines.zero.config.fields import RunFacts
from lightning_shard.engines.zero.config.reading import AUTO, READERS, get, put
from lightning_shard.text import nearest

ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
"""Types that older versions of DeepSpeed had, which compress what they communicate."""

MUON = (
    *("lr", "weight_decay", "momentum", "muon_lr", "adam_lr", "ns_method", "betas", "eps"),
    *("adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states"),
)
"""What DeepSpeed's Muon takes; it drops others without a word, where other types' constructors raise."""


def read_sections(config: dict[str, Any], problems: list[str]) -> None:
    """Check that the types of both sections exist, and read the numbers that are written as text, in place."""
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
        elif not _exists(name, kind):
            near = nearest(kind, [*_own_types(name), "AdamW", "SGD"])
            hint = f": the nearest is {near[0]!r}" if near else ""
            problems.append(f"{name}.type is {kind!r}, which neither DeepSpeed nor torch has{hint}")
        else:
            section["params"] = {key: _without_text(value) for key, value in params.items()}
            for key in params:
                path = f"{name}.params.{key}"
                if key == "max_grad_norm":
                    problems.append(f"{path} can't be used: clipping is the Trainer's. Set gradient_clip_val instead")
                elif str(kind).lower() == "muon" and key not in MUON:
                    problems.append(f"{path} is no hyperparameter of Muon's: known are {', '.join(MUON)}")


def _own_types(section: str) -> list[str]:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return list(DEEPSPEED_OPTIMIZERS if section == "optimizer" else VALID_LR_SCHEDULES)


def _exists(section: str, kind: str) -> bool:
    """Whether it is a type of DeepSpeed's own, which are in lower case for optimizers, or else a class of torch's."""
    if (kind.lower() if section == "optimizer" else kind) in _own_types(section):
        return True
    where, base = (torch.optim, Optimizer) if section == "optimizer" else (torch.optim.lr_scheduler, LRScheduler)
    found = getattr(where, kind, None)
    return inspect.isclass(found) and issubclass(found, base)


def _without_text(value: Any) -> Any:
    """A hyperparameter, of which numbers and flags may be text, in lists too; other words stay as they are."""
    if isinstance(value, list):
        return [_without_text(item) for item in value]
    for read in (READERS["bool"], READERS["int"], READERS["float"]) if isinstance(value, str) else ():
        with suppress(ValueError):
            return read(value)
    return value


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
