"""Read a user's DeepSpeed configuration into one form. Each error becomes a problem, a line with the key's path."""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson
import torch
import yaml

from lightning_shard.engines.zero.config.keys import (
    ALIASES,
    FOREIGN,
    REMOVED,
    REMOVED_ZERO,
    UNSEEN,
    configuration,
    names_of,
    section_of,
)
from lightning_shard.errors import ConfigurationError
from lightning_shard.text import nearest

AUTO = "auto"  # Replaced by the value of the Trainer, the model or DeepSpeed.


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_value(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, with the sections that lead to it."""
    *sections, key = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value


def read_config(config: str | Mapping[str, Any] | None, field: str = "config") -> dict[str, Any]:
    """Copy a configuration that is given as a mapping or as its file's path. ConfigurationError: see `read_file`."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, str):
        raise ConfigurationError(f"{field} is {config!r}, but must be the path of a file, or its content as a mapping.")
    return read_file(Path(config), f"{field} {config!r}")


def read_file(path: Path, name: str = "") -> dict[str, Any]:
    """Read a YAML file, or a JSON file as DeepSpeed does, with comments. ConfigurationError names the file ``name``: it
    is missing, can't be parsed, repeats a key, or holds no mapping.
    """
    name = name or str(path)
    if not path.is_file():
        raise ConfigurationError(f"{name}: there is no such file (from {Path.cwd()}).")
    text = path.read_bytes()
    begins = text.lstrip().startswith((b"{", b"//", b"/*"))
    is_json = path.suffix in (".json", ".hjson") or (path.suffix not in (".yaml", ".yml") and begins)
    try:
        # To hjson an empty file is a mapping.
        content = _parse_json(text) if is_json and text.strip() else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"{name} can't be read as {'JSON' if is_json else 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        held = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigurationError(f"{name} {held}, but must hold a mapping of keys.")
    return {key: value for key, value in content.items() if not str(key).startswith("_comment")}


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except json.JSONDecodeError:
        # hjson reads Infinity, which Python writes, as text, so that json goes first.
        return hjson.loads(text, object_pairs_hook=_refuse_repeated_keys)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} is there twice. Remove one")
    return found


def canonical_config(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Copy ``config`` as DeepSpeed's models read it, in one spelling, without nulls. `AUTO` stays."""
    from pydantic import ValidationError

    content: dict[str, Any] = _tidy(config)
    for key, reason in {**REMOVED, **FOREIGN}.items():
        value = content.pop(key, None)
        if not is_off(value) and not (key.endswith("_parallel_size") and value == 1):
            problems.append(f"{key} can't be used: {reason}. Remove it")
    if content.get("steps_per_print") in (math.inf, "inf", "Infinity"):
        del content["steps_per_print"]  # Never.
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):
        # DeepSpeed's first format had stage 1 alone.
        content["zero_optimization"] = zero = {"stage": int(zero)}
    if isinstance(zero, dict):
        for path, value, reason in pop_unavailable(zero):
            problems.append(f"zero_optimization.{path} is {value!r}, but {reason}. Remove it")
    try:
        made = configuration()(**content)
    except ValidationError as error:
        problems += [_problem(detail) for detail in error.errors()]
        return {}
    found: dict[str, Any] = made.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(zero, dict) and "overlap_comm" not in zero:
        # The model fills it in by the stage.
        found["zero_optimization"].pop("overlap_comm", None)
    return _with_autos(found, content)


def _tidy(value: Any, *, params: bool = False) -> Any:
    """Drop nulls, rename `ALIASES`, and parse numbers such as 1e8, which are text in YAML 1.1. ``params``: parse the
    numbers and flags of hyperparameters, which have no model.
    """
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if item is not None}
        return {ALIASES.get(key, str(key)): _tidy(item, params=params or key == "params") for key, item in kept.items()}
    if isinstance(value, list):
        return [_tidy(item, params=params) for item in value]
    if not isinstance(value, str):
        return copy.deepcopy(value)
    word = value.strip().lower()
    if params and word in ("true", "false"):
        return word == "true"
    return AUTO if word == AUTO else parse_number(value) if params or "e" in word else value


def _with_autos(found: dict[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Put the `AUTO` of ``content``, which the models drop, back into ``found``. Paths become text."""
    for key, value in content.items():
        if value == AUTO:
            found[key] = AUTO
        elif isinstance(found.get(key), dict) and isinstance(value, Mapping):
            found[key] = _with_autos(found[key], value)
    return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


def _problem(detail: Mapping[str, Any]) -> str:
    *sections, key = map(str, detail["loc"])
    path, value = ".".join((*sections, key)), detail["input"]
    if detail["type"] != "extra_forbidden":
        shown = f"is {value!r}" if isinstance(value, str | int | float | list) else "does not fit"
        return f"{path} {shown}, but DeepSpeed's rule is: {detail['msg']}"
    model = configuration()
    for section in sections:
        model = section_of(model, section)
    names = names_of(model)
    near = [f"the nearest is {names[word]!r}" for word in nearest(key, names)]
    return f"{path} is no key of DeepSpeed's: {(*near, 'remove it')[0]}"


def is_off(value: Any) -> bool:
    """Whether the setting of an unavailable feature leaves it off."""
    if isinstance(value, Mapping):
        return not value or is_off(value.get("enabled", "on"))
    return value in (None, False, 0, AUTO) or (isinstance(value, str) and value.lower() == "false")


def pop_unavailable(zero: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Remove unavailable keys from ``zero_optimization``. Yields path, value and reason of each that is not off."""
    for path, reason in {**REMOVED_ZERO, **UNSEEN}.items():
        section, _, key = path.rpartition(".")
        holder = zero.get(section) if section else zero
        value = holder.pop(key, None) if isinstance(holder, dict) else None
        is_idle = value in (None, AUTO, 1) if key == "ratio" else is_off(value) or value == -1
        if not is_idle:
            yield path, value, reason


def parse_number(text: str) -> Any:
    """Parse a number that is written as text, to an int if it is whole. Other text is returned as it is."""
    with suppress(ValueError, OverflowError):
        if text.strip().lstrip("+-").isdigit():
            return int(text)
        number = float(text)
        return int(number) if number == int(number) else number
    return text


MUON = (
    *("lr", "weight_decay", "momentum", "muon_lr", "adam_lr", "ns_method", "betas", "eps"),
    *("adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states"),
)
"""The hyperparameters of DeepSpeed's Muon, which drops others silently. Other constructors raise."""


def read_sections(config: dict[str, Any], problems: list[str]) -> None:
    """Check that the types of both sections exist. Empty sections are removed."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    for name in ("optimizer", "scheduler"):
        section = config.get(name)
        if not section:
            config.pop(name, None)
            continue
        kind, params = section.get("type", AUTO), section.setdefault("params", {})
        is_own = name == "optimizer" and kind.lower() in DEEPSPEED_OPTIMIZERS
        if not is_own and not (hasattr(torch.optim, kind) if name == "optimizer" else schedule_class(kind)):
            problems.append(
                f"{name}.type is {kind!r}, which neither DeepSpeed nor torch has. Correct it, or remove the section "
                "and leave it to configure_optimizers"
            )
        elif kind.lower() == "muon" and (others := params.keys() - set(MUON)):
            problems.append(f"Muon has no {', '.join(sorted(others))}: known are {', '.join(MUON)}")


def schedule_class(kind: str) -> Any:
    """Find a learning rate schedule of DeepSpeed or torch by its class name. None: neither has it."""
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
