"""Saving and loading in one call, as tests want it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files.layout import MODEL_PREFIX
from lightning_shard.checkpoint.files.manifest import Contents, Facts
from lightning_shard.checkpoint.load import load_training_state, open_checkpoint
from lightning_shard.checkpoint.matching import LoadReport
from lightning_shard.checkpoint.optimizer_state import live_tensors, optimizer_states
from lightning_shard.checkpoint.save import training_state
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import fqns

FACTS = Facts(engine="test", policy="fp32")
Path = str | os.PathLike[str]


def save(path: Path, collect: Callable[[], Contents]) -> None:
    Saver().save(path, collect, background=False)


def save_tensors(path: Path, tensors: Mapping[str, Any], trainer_state: Any = None, **kwargs: Any) -> None:
    save(path, lambda: Contents(tensors=tensors, trainer_state=trainer_state or {}, **{"facts": FACTS, **kwargs}))


def save_module(path: Path, **kwargs: Any) -> None:
    save(path, lambda: training_state(**{"optimizers": [], "trainer_state": {}, "facts": FACTS, **kwargs}))


def load_into(path: Path, tensors: Mapping[str, Any], *, strict: bool = True) -> LoadReport:
    """Live tensors by key, in a module that has them: as masters where they are no tensors."""
    module = nn.Module()
    masters = {}
    for key, tensor in tensors.items():
        *owners, name = key.split(".")[1:]
        part = module
        for owner in owners:
            part._modules.setdefault(owner, nn.Module())
            part = part._modules[owner]
        part._buffers[name] = tensor if isinstance(tensor, Tensor) else torch.empty(0)
        if not isinstance(tensor, Tensor):
            masters[key.removeprefix("model.")] = tensor
    return load_training_state(open_checkpoint(path), module=module, masters=masters, strict=strict)


def load_module(path: Path, **kwargs: Any) -> tuple[dict[str, Any], LoadReport]:
    opened = open_checkpoint(path)
    return opened.trainer_state, load_training_state(opened, **kwargs)


def trainer_state(path: Path) -> dict[str, Any]:
    return open_checkpoint(path).trainer_state


def live(
    module: nn.Module, optimizers: Sequence[AnyOptimizer], masters: Mapping[str, LiveTensor] | None = None
) -> dict[str, LiveTensor]:
    """Key to live tensor of all that is saved."""
    names = fqns(module)
    weights = {MODEL_PREFIX + fqn: tensor for fqn, tensor in live_tensors(names, masters).items()}
    return weights | {name.key: tensor for name, tensor in optimizer_states(optimizers, names)[0].items()}
