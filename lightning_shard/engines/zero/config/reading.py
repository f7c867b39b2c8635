"""Read a user's DeepSpeed configuration into one form: known keys in one spelling, values of their type.

Each error becomes a problem, a line with the key's path. The caller raises all problems at once.
"""

import copy
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson
import torch
import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_shard.engines.zero.config.keys import (
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
        raise ConfigurationError(
            f"{field} is {config!r}, of type {type(config).__name__}. Give the path of a DeepSpeed JSON file, or its "
            "content as a mapping."
        )
    return read_file(Path(config), f"{field} {config!r}")


def read_file(path: Path, name: str = "") -> dict[str, Any]:
    """Read a YAML file, or a JSON file as DeepSpeed does: comments and trailing commas are allowed, a repeated key is
    not. ConfigurationError calls the file ``name``: it is missing, can't be parsed, or holds no mapping.
    """
    name = name or str(path)
    if not path.is_file():
        found = "it is a folder, and no file" if path.is_dir() else f"there is no such file (from {Path.cwd()})"
        raise ConfigurationError(f"{name}: {found}.")
    text = path.read_bytes()
    begins = text.lstrip().startswith((b"{", b"//", b"/*"))
    is_json = path.suffix in (".json", ".hjson") or (path.suffix not in (".yaml", ".yml") and begins)
    try:
        # To hjson an empty file is a mapping.
        content = _parse_json(text) if is_json and text.strip() else yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigurationError(f"{name} is nested too deeply to be a configuration.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{name} can't be read as {'JSON' if is_json else 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        held = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigurationError(f"{name} {held}, but must hold a mapping of keys.")
    return dict(_drop_comments(content))


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


def _drop_comments(value: Any) -> Any:
    """Drop the keys ``_comment*``, which stand for comments in strict JSON."""
    if isinstance(value, list):
        return [_drop_comments(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _drop_comments(item) for key, item in value.items() if not str(key).startswith("_comment")}


def canonical_config(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Copy ``config`` without aliases, deprecated keys and nulls, each value as DeepSpeed parses it, or `AUTO`. Appends
    to ``problems``.
    """
    config = dict(config)
    for key in list(config):
        if key in REMOVED or key in FOREIGN:
            reason = REMOVED.get(key) or FOREIGN[key]
            if not is_off(config.pop(key), key):
                problems.append(f"{key} can't be used: {reason}. Remove it")
    if config.get("steps_per_print") in (math.inf, "inf", "Infinity"):
        del config["steps_per_print"]  # Never.
    config = _rewrite_old_keys(config, problems)
    return _read_section(config, configuration(), "", problems)


def is_off(value: Any, key: str = "") -> bool:
    """Whether the setting of an unavailable feature leaves it off."""
    if key in ("sequence_parallel_size", "data_parallel_size") and value == 1:
        return True
    if key == "tensor_parallel" and isinstance(value, Mapping) and set(value) == {"autotp_size"}:
        return value["autotp_size"] in (0, 1)
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


def _rewrite_old_keys(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Rewrite the deprecated keys of ``zero_optimization``, and refuse the removed ones."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        # DeepSpeed's first format had stage 1 alone.
        zero = {"stage": int(zero)}
    if not isinstance(zero, Mapping):
        return config
    zero = dict(zero)
    for path, value, reason in pop_unavailable(zero):
        problems.append(f"zero_optimization.{path} is {value!r}, but {reason}. Remove it")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if str(zero.pop(old, False)).lower() in ("true", "1"):
            zero.setdefault(new, {"device": "cpu"})
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for section in ("offload_optimizer", "offload_param"):
        if pinned is not None and isinstance(zero.get(section), Mapping):
            zero[section] = {"pin_memory": pinned, **zero[section]}
    old_name = "stage3_gather_fp16_weights_on_model_save"
    if old_name in zero:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", zero.pop(old_name))
    return {**config, "zero_optimization": zero}


def _read_section(content: Mapping[str, Any], model: Any, path: str, problems: list[str]) -> dict[str, Any]:
    from pydantic import ValidationError

    names, result, given = names_of(model), dict[str, Any](), dict[str, Any]()
    for key, value in content.items():
        if (name := names.get(str(key))) is None:
            near = [names[word] for word in nearest(str(key), names)]
            hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(names)}"
            problems.append(f"{path}{key} is no key of DeepSpeed's: {hint}")
            continue
        section, is_auto = section_of(model, name), isinstance(value, str) and value.strip().lower() == AUTO
        if value is None or (section and is_auto):
            continue
        if section and not isinstance(value, Mapping):
            problems.append(f"{path}{name} is {value!r}, but must be a mapping of keys")
            continue
        read = _read_section(value, section, f"{path}{name}.", problems) if section else AUTO if is_auto else value
        if not section and not is_auto:
            given[name] = read = parse_number(value) if isinstance(value, str) and "e" in value.lower() else value
        if name in result and result[name] != read:
            problems.append(f"{path}{name} is given twice, as {result[name]!r} and, under another name, as {read!r}")
        result[name] = read
    try:
        made = model(**given)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(map(str, detail["loc"][:1]))
            found = f"{path}{key} is {given.get(key)!r}" if key else f"{path.rstrip('.')} does not fit"
            problems.append(f"{found}, but DeepSpeed's rule is: {detail['msg']}")
        return result
    values = {names[name]: getattr(made, name) for name in model.model_fields if names[name] in given}
    return result | {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def parse_number(text: str) -> Any:
    """Parse a number that is written as text, to an int if it is whole. Other text is returned as it is. In YAML 1.1
    1e8 is text.
    """
    with suppress(ValueError, OverflowError):
        if text.strip().lstrip("+-").isdigit():
            return int(text)
        number = float(text)
        return int(number) if number == int(number) else number
    return text


ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
"""Optimizers of older versions of DeepSpeed, with compressed communication."""

MUON = (
    *("lr", "weight_decay", "momentum", "muon_lr", "adam_lr", "ns_method", "betas", "eps"),
    *("adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states"),
)
"""The hyperparameters of DeepSpeed's Muon, which drops others silently. Other constructors raise."""


def read_sections(config: dict[str, Any], problems: list[str]) -> None:
    """Check that the types of both sections exist, and parse numbers that are written as text, in place."""
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
        elif not _type_exists(name, kind):
            near = nearest(kind, [*_own_types(name), "AdamW", "SGD"])
            hint = f": the nearest is {near[0]!r}" if near else ""
            problems.append(f"{name}.type is {kind!r}, which neither DeepSpeed nor torch has{hint}")
        else:
            section["params"] = params = {key: _parse_values(value) for key, value in params.items()}
            for key in params:
                path = f"{name}.params.{key}"
                if key == "max_grad_norm":
                    problems.append(f"{path} can't be used: clipping is the Trainer's. Set gradient_clip_val instead")
                elif str(kind).lower() == "muon" and key not in MUON:
                    problems.append(f"{path} is no hyperparameter of Muon's: known are {', '.join(MUON)}")
                elif key.endswith("_lr") and any(rate < 0 for rate in _numbers(params[key])):
                    problems.append(f"{path} is {params[key]!r}, but a learning rate must be 0 or more. Correct it")
            _check_values(name, kind, params, problems)


def _numbers(value: Any) -> list[float]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]


def _check_values(section: str, kind: str, params: Mapping[str, Any], problems: list[str]) -> None:
    """Refuse values that torch's optimizer of that type refuses, its AdamW for a type that torch has not. Refuse a
    ``warmup_type`` that DeepSpeed's schedules would replace silently.
    """
    from deepspeed.runtime.lr_schedules import WARMUP_LINEAR_RATE, WARMUP_LOG_RATE

    if section == "optimizer":
        name = {"adagrad": "Adagrad"}.get(kind.lower(), "AdamW" if kind.lower() in _own_types(section) else kind)
        made = getattr(torch.optim, name)
        takes = inspect.signature(made).parameters
        known = {key: value for key, value in params.items() if key in takes and value != AUTO}
        try:
            made([torch.nn.Parameter(torch.zeros(1))], **known)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            problems.append(f"optimizer.params is {known!r}, which torch's {name} refuses: {error}. Correct it")
    elif (word := params.get("warmup_type", AUTO)) not in (AUTO, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        rule = f"must be {WARMUP_LOG_RATE} or {WARMUP_LINEAR_RATE}"
        problems.append(f"scheduler.params.warmup_type is {word!r}, but {rule}. Correct it")


def _own_types(section: str) -> list[str]:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return list(DEEPSPEED_OPTIMIZERS if section == "optimizer" else VALID_LR_SCHEDULES)


def _type_exists(section: str, kind: str) -> bool:
    """Whether ``kind`` is a type of DeepSpeed, in any case for optimizers, or a class of torch."""
    if (kind.lower() if section == "optimizer" else kind) in _own_types(section):
        return True
    found = find_class(section, kind)
    return inspect.isclass(found) and issubclass(found, Optimizer if section == "optimizer" else LRScheduler)


def find_class(section: str, kind: str) -> Any:
    """Find an optimizer of torch, or a schedule of DeepSpeed or torch, by its class name."""
    from deepspeed.runtime import lr_schedules

    modules = [torch.optim] if section == "optimizer" else [lr_schedules, torch.optim.lr_scheduler]
    return next((found for module in modules if (found := getattr(module, kind, None)) is not None), None)


def _parse_values(value: Any) -> Any:
    """Parse a hyperparameter whose numbers and flags may be text, in lists too. Other words stay."""
    if isinstance(value, list):
        return [_parse_values(item) for item in value]
    if not isinstance(value, str):
        return value
    return {"true": True, "false": False}.get(value.strip().lower(), parse_number(value))
