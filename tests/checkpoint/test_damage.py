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
from lightning_shard.errors import CheckpointCorruptError, CheckpointReplacedError
from tests.checkpoint.calls import load_into, save_tensors
from tests.checkpoint.test_safety import fresh, refused
from tests.harness import run_distributed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    save_tensors(tmp_path / "a.ckpt", fresh(1.0), trainer_state={"epoch": 1, "t": torch.ones(2)})
    return tmp_path / "a.ckpt"


def test_every_flipped_byte_and_missing_file_is_found_and_named(path):
    for file in sorted(path.iterdir()):
        name, original = re.escape(file.name), file.read_bytes()
        for position in (0, len(original) // 3, len(original) // 2, len(original) - 2):
            damaged = bytearray(original)
            damaged[position] ^= 0x10
            file.write_bytes(damaged)
            refused(path, name)
        if file.name != "manifest.json":
            file.write_bytes(original[:-1])
            refused(path, rf"{name} has {len(original) - 1} bytes, manifest\.json says {len(original)}")
            file.unlink()
            refused(path, rf"{name} can't be read \(No such file or directory\)")
        file.write_bytes(original)
    load_into(path, fresh())


def said_of(path: Path) -> str:
    with pytest.raises(CheckpointCorruptError) as refusal:
        load_into(path, fresh())
    return str(refusal.value)


def test_all_ranks_refuse_alike(path):
    """One rank compares the file with its checksum."""
    damaged = bytearray((path / "__0_0.distcp").read_bytes())
    damaged[100] ^= 1
    (path / "__0_0.distcp").write_bytes(damaged)
    first, second = run_distributed(said_of, 2, path)
    assert first == second
    assert "__0_0.distcp does not match its checksum" in first


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
