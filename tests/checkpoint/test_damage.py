"""Files that were damaged, cut, lost or replaced are found and named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.tensor_files import read_full
from lightning_shard.checkpoint.load import open_checkpoint
from lightning_shard.errors import CheckpointError, CheckpointReplacedError
from tests.checkpoint.calls import load_into, save_tensors
from tests.checkpoint.test_safety import fresh, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    save_tensors(tmp_path / "a.ckpt", fresh(1.0), trainer_state={"epoch": 1, "t": torch.ones(2)})
    return tmp_path / "a.ckpt"


def flips(path: Path) -> list[tuple[str, int]]:
    """Places to damage: the ends of each file, the middle and some between."""
    places = []
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        places += [(file.name, position) for position in sorted({0, 1, size // 3, size // 2, size - 2, size - 1})]
    return places


def test_every_flipped_byte_is_found_and_named(path):
    for name, position in flips(path):
        original = (path / name).read_bytes()
        damaged = bytearray(original)
        damaged[position] ^= 0x10
        (path / name).write_bytes(damaged)
        pattern = re.escape(name)
        with pytest.raises(CheckpointError, match=pattern):
            open_checkpoint(path)
        refused(path, pattern)
        (path / name).write_bytes(original)
    open_checkpoint(path)
    load_into(path, fresh())


def test_a_truncated_or_missing_file_is_found_and_named(path):
    for name in ("__0_0.distcp", ".metadata", "trainer.pt"):
        original = (path / name).read_bytes()
        (path / name).write_bytes(original[:-1])
        refused(path, rf"{re.escape(name)} has {len(original) - 1} bytes, manifest\.json says {len(original)}")
        (path / name).unlink()
        refused(path, rf"{re.escape(name)} can't be read \(No such file or directory\)")
        (path / name).write_bytes(original)


def test_a_checkpoint_that_is_replaced_or_removed_while_it_is_open_is_read_as_it_was(path):
    for change in (lambda: save_tensors(path, fresh(2.0)), lambda: commit.remove_checkpoint(path)):
        opened = open_checkpoint(path)
        before = read_full(opened.directory, opened.metadata, "model.w")
        change()
        assert torch.equal(read_full(opened.directory, opened.metadata, "model.w"), before)
        del opened
    save_tensors(path, fresh(3.0))
    assert os.listdir(path.parent) == [path.name], "what was read is deleted by the next save"


def test_without_locks_a_checkpoint_that_is_replaced_is_not_called_damaged(path, monkeypatch):
    monkeypatch.setattr(layout, "try_lock", lambda *_: True)
    opened = open_checkpoint(path)
    save_tensors(path, fresh(2.0))
    with pytest.raises(CheckpointReplacedError, match="was replaced or removed while it was read: read it again"):
        read_full(opened.directory, opened.metadata, "model.w")
