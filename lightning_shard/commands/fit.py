"""What ``fit``, ``validate``, ``test`` and ``predict`` check and change in their configuration, and say at the end."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard import registry
from lightning_shard.arguments import imported
from lightning_shard.checkpoint.files.layout import other_form
from lightning_shard.commands.options import UsageError
from lightning_shard.precision.policy import ALL, PRECISIONS, SHORT_FORMS

_FP16_FLAGS = ("16", "16-mixed")  # as Lightning reads them
_CHECKPOINT_WORDS = ("auto", "best", "last", "hpc", "registry")


def check_trainer(trainer: Namespace | None, *, runs: bool) -> None:
    """Refuse values of the Trainer that it would take without a word, or refuse without saying what is allowed.

    ``runs``: the run is to start on this machine.
    """
    settings = trainer or Namespace()
    strategy = settings.get("strategy")
    if isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry):
        raise UsageError(f"trainer.strategy: {registry.unknown_name(strategy)}")
    devices, accelerator = str(settings.get("devices", "auto")), str(settings.get("accelerator"))
    if not re.fullmatch(r"auto|-1|[1-9]\d*|\[?\d+(, *\d+)+,?\]?|\[\d+\]|\d+,", devices):
        raise UsageError(f"trainer.devices: got {devices}; allowed: a number of 1 or more, indices, or auto.")
    if runs and accelerator in ("gpu", "cuda") and not torch.accelerator.is_available():
        build = "sees none" if torch.version.cuda else "is built for CPUs alone: install its CUDA build"
        raise UsageError(
            f"trainer.accelerator: got {accelerator}, but there is no GPU: torch {torch.__version__} {build}. "
            "Set cpu or auto."
        )
    seen = torch.accelerator.device_count()
    if runs and seen and accelerator in ("gpu", "cuda", "auto") and devices.isdigit() and int(devices) > seen:
        raise UsageError(
            f"trainer.devices: got {devices}, but this process sees {seen} of its node's GPUs. Set {seen}, or under "
            f"SLURM give --gpus-per-node={devices}: --gpus-per-task hides those of the other tasks."
        )
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0), ("num_nodes", 1)):
        value = settings.get(name)
        if value is not None and value < least:
            raise UsageError(f"trainer.{name}: got {value}; allowed: {least} or more.")
    precision = settings.get("precision")
    if _is_own(strategy) and precision is not None:
        word = SHORT_FORMS.get(str(precision), str(precision))
        if word not in PRECISIONS:
            raise UsageError(f"trainer.precision: got {precision}; strategies of lightning_shard run {ALL}.")


def check_ckpt_path(path: Any) -> None:
    """Refuse a local path at which there is no checkpoint; words and remote paths are left to Lightning."""
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _CHECKPOINT_WORDS:
        return
    given = f"ckpt_path: {str(path)!r}"
    if not Path(path).exists():
        raise UsageError(f"{given} does not exist. Allowed: the path of a checkpoint, or one of auto, best, last.")
    if Path(path).is_file():
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK" and not start.startswith(b"\x80"):  # torch's zip files, and pickles of before torch 1.6
            raise UsageError(f"{given} is not a checkpoint. Allowed: a checkpoint directory or a .ckpt file.")


def give_fp16_by_plugin(trainer: Namespace | None) -> None:
    """Replace ``precision: 16-mixed`` of a parsed ``trainer`` section by `ShardPrecision`, for own strategies."""
    if trainer is None or str(trainer.get("precision")) not in _FP16_FLAGS or not _is_own(trainer.get("strategy")):
        return
    plugins = trainer.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
    own = Namespace(class_path="lightning_shard.ShardPrecision", init_args=Namespace(precision="16-mixed"))
    trainer["plugins"] = [*plugins, own]
    trainer["precision"] = None


def _is_own(strategy: Any) -> bool:
    """Whether ``trainer.strategy``, as it was parsed, is a strategy of this package, by its name or its class."""
    if isinstance(strategy, str):
        return strategy.lower() in registry.PRESETS
    from lightning_shard.strategies.strategy import ShardStrategy

    found = imported(getattr(strategy, "class_path", ""))
    return isinstance(found, type) and issubclass(found, ShardStrategy)


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


def print_checkpoints(trainer: Trainer) -> tuple[str, str]:
    """Print where the best and the last checkpoint are; returns both that load, one for the other or ``""``."""
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or not (callback.best_model_path or callback.last_model_path):
        return "", ""
    best, last = _shortest(callback.best_model_path), _shortest(callback.last_model_path)
    score = callback.best_model_score if best else None
    scored = "" if score is None else f" (best {callback.monitor}: {float(score):.6g})"
    print(f"checkpoint: {best or last}{scored}")
    if best and last and best != last:
        print(f"last checkpoint: {last}")
    loading = [path for path in (best, last) if path and other_form(path) != "hf"]
    return (loading[0], loading[-1]) if loading else ("", "")


def _shortest(path: str) -> str:
    """Relative to the current folder where it lies in it."""
    absolute = Path(path).absolute()
    return path and str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


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
