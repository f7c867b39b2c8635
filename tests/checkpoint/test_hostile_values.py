"""Values and special files that no save writes: each gives one line at once, whoever opens the checkpoint."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.checkpoint.foreign.pretrained_weights import SafetensorsReader
from lightning_shard.checkpoint.inspect import describe, open_any, verify
from lightning_shard.checkpoint.load import find_checkpoints
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoint.calls import FACTS, save_tensors, trainer_state
from tests.checkpoint.test_safety import rewrite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    facts = {"name": "mine", "step": 1, "time": 0.0}
    save_tensors(path, {"model.w": torch.ones(4, 3)}, facts=type(FACTS)(engine="e", policy="p", run=facts))
    return path


def refused_by_all(path: Path) -> None:
    """One line and no waiting, by every reader; the search for the newest goes past it."""
    started = time.process_time()
    for read in (open_any, verify, trainer_state, lambda p: describe(p, open_any(p))):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert len(str(caught.value)) < 1000
    assert find_checkpoints([path.parent], "mine").own == ()
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "change",
    [
        {"aliases": 5},
        {"aliases": {"model.x": "model.y"}},
        {"aliases": {"model.x": {"a": 1}}},
        {"run": {"name": "mine", "step": "x", "time": 0.0}},
        {"run": {"name": "mine", "step": 1}},
        {"tensors": {"model.w": {"shape": ["x"], "dtype": "float32"}}},
        {"tensors": {"model.w": {"shape": [4, 3], "dtype": "nn"}}},
        {"tensors": {"model.w": {"shape": [4, 3], "dtype": "quint8"}}},
        {"tensors": 3},
        {"files": {"a": {"size": "x", "sha256": 1}}},
        {"format_version": "x"},
        *({fact.name: 3.5} for fact in fields(Facts)),
        {"world_size": 0},
    ],
    ids=str,
)
def test_values_in_a_manifest(path: Path, change: dict[str, Any]) -> None:
    rewrite(path, lambda fields: {**fields, **change})
    refused_by_all(path)


@pytest.mark.parametrize("name", ["manifest.json", "trainer.pt", "boxes.bin", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_a_special_file(path: Path, name: str, kind: str) -> None:
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to("/dev/zero" if kind == "device" else "/etc/hostname")
    if name == "__0_0.distcp":
        with pytest.raises(CheckpointError):
            open_any(path).tensors["model.w"].read()
        with pytest.raises(CheckpointError):
            verify(path)
    else:
        refused_by_all(path)


def test_special_files_in_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").symlink_to("/dev/zero")
    for name in ("a.ckpt", "b.ckpt"):
        refused_by_all(tmp_path / name)
    os.mkfifo(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with SafetensorsReader() as reader, pytest.raises(CheckpointCorruptError, match="is no regular file"):
        reader.entries(tmp_path)
