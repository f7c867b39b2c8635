"""Files as they are read from disk, and which format one has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_shard.errors import ConfigurationError
from lightning_shard.migrate.neutral import shown

Format = Literal["accelerate", "deepspeed", "lightning"]

_SIGNS: Mapping[Format, tuple[str, ...]] = {
    "accelerate": (
        "compute_environment", "distributed_type", "num_machines", "num_processes", "machine_rank", "fsdp_config",
        "deepspeed_config", "mixed_precision", "main_training_function", "use_cpu",
    ),
    "deepspeed": (
        "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "gradient_clipping", "fp16", "bf16", "bfloat16", "optimizer", "scheduler", "steps_per_print",
        "wall_clock_breakdown",
    ),
    "lightning": ("trainer", "model", "data", "seed_everything", "ckpt_path", "optimizer", "lr_scheduler"),
}  # fmt: skip
"""Top-level keys by which a format is known."""


def read_file(path: Path) -> dict[str, Any]:
    """The content of a YAML or JSON file.

    Raises:
        ConfigurationError: there is no such file, it is neither, it is no mapping, or it has a key twice.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file (from {Path.cwd()}).")
    try:
        text = path.read_text(encoding="utf-8")
        content = _json(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} can't be read as {path.suffix.lstrip('.') or 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}, but must hold a mapping of keys.")
    return content


def content_of(config: Any, field: str) -> dict[str, Any]:
    """The content of a configuration that a field gives as a mapping, or as the path of its file.

    Raises:
        ConfigurationError: it is neither, or `read_file` raises it.
    """
    if isinstance(config, str):
        return read_file(Path(config))
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"{field} is {shown(config)!r}, but must be a path or a mapping.")
    return dict(config)


def format_of(path: Path, content: Mapping[str, Any]) -> Format:
    """Which of the formats a file has, by its top-level keys.

    Raises:
        ConfigurationError: none of them.
    """
    scores = {name: len(set(map(str, content)) & set(signs)) for name, signs in _SIGNS.items()}
    # `optimizer` is a key of two formats; `trainer` decides.
    if isinstance(content.get("trainer"), Mapping):
        return "lightning"
    best = max(scores, key=lambda name: scores[name])
    if scores[best] == 0:
        raise ConfigurationError(
            f"{path} is none of the known formats: it has the keys {', '.join(map(repr, content)) or 'none'}, but an "
            "Accelerate config file has distributed_type, a DeepSpeed file zero_optimization, and a Lightning YAML "
            "trainer."
        )
    return best


class _Loader(yaml.SafeLoader):
    """PyYAML's, which refuses a key that is there twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    _refuse_twice(keys)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _json(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([key for key, _ in items])
        return dict(items)

    return json.loads(text, object_pairs_hook=pairs)


def _refuse_twice(keys: list[Any]) -> None:
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise yaml.YAMLError(f"the key {', '.join(map(repr, twice))} is there twice; remove one")
