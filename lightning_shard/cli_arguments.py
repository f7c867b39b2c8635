"""What the command line was given, as words and as a parsed configuration: checks of it, and what is made of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard import mistakes, registry

FP16_FLAGS = ("16", "16-mixed")
"""As Lightning reads them."""

_CHECKPOINT_WORDS = ("auto", "best", "last", "hpc", "registry")


def check_strategy(strategy: Any) -> None:
    if isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry):
        raise mistakes.UsageError(f"trainer.strategy: {registry.unknown_name(strategy)}")


def is_own(strategy: Any) -> bool:
    """Whether ``trainer.strategy``, as it was parsed, is a strategy of this package, by its name or its class."""
    if isinstance(strategy, str):
        return strategy.lower() in registry.PRESETS
    class_path = getattr(strategy, "class_path", None)
    if class_path is None:
        return False
    from lightning_shard.strategies.base import ShardStrategy

    module, _, name = class_path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return isinstance(found, type) and issubclass(found, ShardStrategy)


def check_ckpt_path(path: Any) -> None:
    """Of a local path; words that Lightning resolves and remote paths are left to it."""
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _CHECKPOINT_WORDS:
        return
    if not Path(path).exists():
        raise mistakes.UsageError(
            f"ckpt_path: {str(path)!r} does not exist. Allowed: the path of a checkpoint, or one of auto, best, last."
        )
    if Path(path).is_file():
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK" and not start.startswith(b"\x80"):  # torch's zip files, and pickles of before torch 1.6
            raise mistakes.UsageError(
                f"ckpt_path: {str(path)!r} is not a checkpoint. Allowed: a checkpoint directory or a .ckpt file."
            )


def broken_config(arguments: Sequence[str]) -> str:
    """``"PATH: "`` of the first ``--config`` file that is no YAML mapping, or ``""``: the parser doesn't say which."""
    for option, value in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, inline = option.partition("=")
        path = Path(inline if equals else value)
        if name not in ("-c", "--config") or not path.is_file():
            continue
        try:
            if not isinstance(yaml.safe_load(path.read_text()), dict | None):
                return f"{path}: "
        except (yaml.YAMLError, UnicodeDecodeError):
            return f"{path}: "
    return ""


def shortest(path: str) -> str:
    """Relative to the current folder where it lies in it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def validate_arguments(fit: Sequence[str], ckpt_path: str) -> list[str]:
    """The arguments of ``fit`` with ``validate`` and the checkpoint in place of its own."""
    arguments: list[str] = []
    words = iter(fit)
    for word in words:
        if word == "--ckpt_path":
            next(words, None)
        elif not word.startswith("--ckpt_path="):
            arguments.append(word)
    arguments[arguments.index("fit")] = "validate"
    return [*arguments, "--ckpt_path", ckpt_path]
