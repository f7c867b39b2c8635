"""What is said of a checkpoint, and every kind of damage that is found in it."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.files.manifest import Facts, read_manifest
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import describe, open_any, verify
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)
from tests.checkpoint.calls import save_tensors


def test_describe_names_what_is_there(trained: Path) -> None:
    text = describe(trained, open_any(trained))
    for part in (
        "test on 1 process",
        "epoch 3, step 2",
        "AdamW",
        "dtypes as measured: not recorded",
        "model.frozen                          3x5                         bfloat16  30",
        "model.head.weight                     tied to model.embed.weight",
        "9 tensors of the model with 96 elements, 18 of optimizers, 0 averages; 1,018 bytes",
    ):
        assert part in text, part


def test_describe_summarises_the_ledger(tmp_path: Path) -> None:
    rows = [{"what": "trainable", "count": 3, "first": "w", "dtypes": {"loaded": "bfloat16", "step": "float32"}}]
    info = Facts(engine="fsdp", policy="p", ledger={"tensors": rows, "reduction": ["float32"]})
    save_tensors(tmp_path / "a.ckpt", {"model.w": torch.ones(2)}, facts=info)
    text = describe("a", open_any(tmp_path / "a.ckpt"))
    assert "dtypes, as measured  count  loaded    step\ntrainable            3      bfloat16  float32" in text
    assert "gradients reduced in: float32" in text


def test_verify_names_every_damaged_file(trained: Path) -> None:
    assert verify(trained) == [".metadata", "__0_0.distcp", "boxes.bin", "trainer.pt", "manifest.json"]
    for name in (".metadata", "trainer.pt"):
        data = bytearray((trained / name).read_bytes())
        data[len(data) // 2] ^= 1
        (trained / name).write_bytes(data)
    (trained / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointCorruptError) as raised:
        verify(trained)
    first, *lines, _ = str(raised.value).splitlines()
    assert first.endswith("is damaged: .metadata, __0_0.distcp, trainer.pt")
    assert len(lines) == 3


def test_verify_of_one_file_checks_its_records(tmp_path: Path, trained: Path) -> None:
    path = tmp_path / "full.ckpt"
    write_full(path, open_any(trained))
    assert verify(path) == ["full.ckpt"]
    original = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if info.file_size]
        starts = [info.header_offset + 30 + len(info.filename) + 20 + 4 for info in records]
    for info, start in zip(records, starts, strict=True):
        damaged = bytearray(original)
        damaged[start + -start % 64] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=rf"full\.ckpt is damaged: .*{re.escape(info.filename)}"):
            verify(path)
    path.write_bytes(original[:-1])
    with pytest.raises(CheckpointError, match=r"full\.ckpt is (damaged|no whole file)"):
        verify(path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    weights, run = tmp_path / "exported", tmp_path / "run"
    for folder in (weights, run / "checkpoints"):
        folder.mkdir(parents=True)
    (weights / "model.safetensors").touch()
    (run / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "link.ckpt").symlink_to("3.ckpt")
    for path, told in (
        (run / "nothing", "there is no checkpoint at"),
        (tmp_path / "link.ckpt", "link.ckpt is a link to 3.ckpt, where there is no checkpoint"),
        (weights, f"weights alone, from which none resumes: callbacks.PretrainedWeights('{weights}') loads them"),
        (weights / "model.safetensors", "It has weights alone, from which none resumes"),
        (run, f"It is a folder with checkpoints. The newest: ckpt_path='{run}/checkpoints/last.ckpt'"),
    ):
        with pytest.raises(CheckpointNotFoundError, match=re.escape(told)):
            open_any(path)
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        read_manifest(run / "checkpoints" / "last.ckpt")
