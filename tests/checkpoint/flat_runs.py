"""Saves and loads of the runs in `tests.checkpoint.flat`, and what is compared of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.fit import LoadReport
from lightning_shard.checkpoint.load import load_tensors, load_training_state, read_manifest
from lightning_shard.checkpoint.save import CheckpointInfo, save_training_state
from tests.checkpoint.flat import Run

INFO = CheckpointInfo(engine="test", policy="fp32")


def save_run(run: Run, path: str) -> None:
    optimizers = [run.optimizer]
    save_training_state(
        path, module=run.net, optimizers=optimizers, masters=run.masters, trainer_state={"epoch": 1}, info=INFO
    )


def load_run(run: Run, path: str, **kwargs: Any) -> LoadReport:
    return load_training_state(path, module=run.net, optimizers=[run.optimizer], masters=run.masters, **kwargs)[1]


def stored(path: str) -> dict[str, Tensor]:
    entries = read_manifest(path).tensors
    tensors = {key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in entries.items()}
    load_tensors(path, tensors)
    return tensors


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: object = "") -> None:
    assert found.keys() == expected.keys(), where
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, (where, key)
        assert torch.equal(found[key], tensor), (where, key)
