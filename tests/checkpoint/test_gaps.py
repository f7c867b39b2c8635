"""Boxes that leave a part of a tensor out are found when a checkpoint is opened, by whichever rank looks at them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.files.boxes import DecodedBoxes, encode_boxes
from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.checkpoint.load import open_checkpoint
from lightning_shard.errors import CheckpointCorruptError
from tests.checkpoint.calls import save_tensors
from tests.checkpoint.test_safety import forge
from tests.harness import run_distributed

KEYS = ["model.a", "model.b", "model.c"]


def _said(path: str) -> str:
    with pytest.raises(CheckpointCorruptError) as refusal:
        open_checkpoint(path)
    return str(refusal.value)


@pytest.mark.parametrize("key", KEYS)
def test_a_gap_is_refused_on_all_ranks(key: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_tensors(path, {name: torch.ones(4, 3) for name in KEYS})
    found = DecodedBoxes((path / "boxes.bin").read_bytes(), read_manifest(path))
    tables = {name: found[name].rows.copy() for name in KEYS}
    tables[key][0, 5] = 3  # Of four rows one is in no box.
    forge(path, "boxes.bin", encode_boxes(tables.values()))
    said = f"the boxes of {key} do not make up its shape"
    assert said in _said(str(path))
    assert all(said in each for each in run_distributed(_said, 2, str(path)))
