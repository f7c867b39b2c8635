"""Hyperparameters that the run knows: "auto" is filled in, and a number that differs is a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.zero.config.fields import RunFacts
from lightning_shard.engines.zero.config.merging import get, put
from lightning_shard.engines.zero.config.reading import AUTO

KNOWN_BY_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")


def differ(config: dict[str, Any], path: str, value: Any, whose: str, problems: list[str]) -> None:
    """A problem where ``config`` has another value than the run at ``path``; nothing there, or "auto", is none."""
    given = get(config, path)
    if given not in (None, AUTO) and given != value:
        problems.append(f"{path} is {given!r}, but {whose} is {value!r}")


def resolve_hyperparameters(config: dict[str, Any], facts: RunFacts, problems: list[str]) -> None:
    """Fill in both sections in place."""
    known = {} if facts.optimizer is None else _plain(facts.optimizer)
    if "optimizer" in config:
        _optimizer(config, known, problems)
        _adam(config["optimizer"], facts)
    if "scheduler" in config:
        _scheduler(config, facts, known, problems)


def _plain(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.items() if v is not None}


def _optimizer(config: dict[str, Any], known: dict[str, Any], problems: list[str]) -> None:
    kind, existing = config["optimizer"]["type"], known.get("type")
    if existing is not None and not _same_type(kind, existing):
        problems.append(
            f"optimizer.type is {kind!r}, but configure_optimizers returns {existing}: remove the section, or return "
            "no optimizer"
        )
    for key in KNOWN_BY_OPTIMIZER:
        path = f"optimizer.params.{key}"
        if key in known:
            differ(config, path, known[key], "the optimizer's", problems)
            if get(config, path) == AUTO:
                put(config, path, known[key])
    if get(config, "optimizer.params.lr") == AUTO:
        problems.append(
            "optimizer.params.lr is 'auto', but no learning rate is known: write a number, or return the optimizer "
            "from configure_optimizers"
        )


def _adam(section: dict[str, Any], facts: RunFacts) -> None:
    """Which of its three Adams DeepSpeed builds, where the section does not say.

    Under the contract torch's, whose numbers FSDP and DDP have too: DeepSpeed's fused and CPU kernels round otherwise.
    In low memory the CPU's with moments in the masters' dtype, not in fp32.
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


def _same_type(kind: str, existing: str) -> bool:
    """Whether a class may stand for DeepSpeed's type, whose Adam is AdamW unless ``adam_w_mode`` is off."""
    kind, existing = kind.lower(), existing.lower()
    return kind in existing or (kind in ("adam", "adamw") and "adam" in existing)


def _scheduler(config: dict[str, Any], facts: RunFacts, known: dict[str, Any], problems: list[str]) -> None:
    rate = known.get("lr", get(config, "optimizer.params.lr"))
    # DeepSpeed refuses 0 warm-up steps.
    warmup = None if facts.warmup_steps is None else max(1, facts.warmup_steps)
    if warmup is None and get(config, "scheduler.params.warmup_num_steps") == AUTO:
        put(config, "scheduler.params.warmup_num_steps", 1)
    sources = {
        "total_num_steps": (facts.total_steps, "the Trainer's number of optimizer steps"),
        "warmup_num_steps": (warmup, "the run's number of warm-up steps"),
        "warmup_max_lr": (None if rate == AUTO else rate, "the optimizer's learning rate"),
    }
    for key, (value, whose) in sources.items():
        path = f"scheduler.params.{key}"
        if value is not None:
            differ(config, path, value, whose, problems)
            if get(config, path) == AUTO:
                put(config, path, value)
        elif get(config, path) == AUTO:
            problems.append(f"{path} is 'auto', but {whose} is not known: write a number")
    if get(config, "scheduler.params.warmup_min_lr") == AUTO:
        put(config, "scheduler.params.warmup_min_lr", 0)
