"""Saves and loads of the runs in `tests.checkpoint.flat`, and what is compared of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.checkpoint.load import read_manifest
from lightning_shard.checkpoint.matching import LoadReport
from tests.checkpoint.calls import load_into, load_module, save_module
from tests.checkpoint.flat import Run

INFO = Facts(engine="test", policy="fp32")


def save_run(run: Run, path: str) -> None:
    optimizers = [run.optimizer]
    save_module(
        path, module=run.net, optimizers=optimizers, masters=run.masters, trainer_state={"epoch": 1}, facts=INFO
    )


def load_run(run: Run, path: str, **kwargs: Any) -> LoadReport:
    return load_module(path, module=run.net, optimizers=[run.optimizer], masters=run.masters, **kwargs)[1]


def stored(path: str) -> dict[str, Tensor]:
    entries = read_manifest(path).tensors
    tensors = {key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in entries.items()}
    load_into(path, tensors)
    return tensors


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: object = "") -> None:
    assert found.keys() == expected.keys(), where
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, (where, key)
        assert torch.equal(found[key], tensor), (where, key)
