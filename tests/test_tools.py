"""The commands as functions: what they return, and that bad arguments are refused as the commands do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import CheckpointError, ConfigurationError
from lightning_shard.commands.options import UsageError
from lightning_shard.tools import convert, export, migrate, plan, verify


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock Lightning file."""
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(BoringModel())
    path = tmp_path_factory.mktemp("saved") / "stock.ckpt"
    trainer.save_checkpoint(path)
    return path


def test_a_checkpoint_is_converted_verified_and_exported(saved: Path, tmp_path: Path) -> None:
    done = convert(saved, tmp_path / "portable.ckpt", weights_only=True)
    assert (done.form, done.path) == ("portable", tmp_path / "portable.ckpt")
    assert "trainer.pt" in verify(done.path)
    back = convert(done.path, tmp_path / "back.ckpt")
    assert (back.source_form, back.form) == ("portable", "full")
    before, after = (torch.load(path, weights_only=False)["state_dict"] for path in (saved, back.path))
    assert {name: tensor.tolist() for name, tensor in before.items()} == {n: t.tolist() for n, t in after.items()}
    files = export(done.path, tmp_path / "weights", dtype="bf16")
    assert [file.suffix for file in files] == [".safetensors"]
    with pytest.raises(CheckpointError, match=r"back\.ckpt exists: choose another path"):
        convert(done.path, back.path)
    wrong: Any
    for call, wrong, says in (
        (convert, {"form": "stock"}, "form is 'stock', but must be 'portable', 'full' or None"),
        (export, {"dtype": "bfloat16"}, "dtype is 'bfloat16', but must be 'fp32', 'bf16', 'fp16' or None"),
        (export, {"max_shard_size": 5}, "max_shard_size is 5, but must be a string"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            call(done.path, tmp_path / "again", **wrong)
        assert not (tmp_path / "again").exists()
    with pytest.raises(ConfigurationError, match=r"'5 apples' is no size\. Write a number and a unit"):
        export(done.path, tmp_path / "again", max_shard_size="5 apples")


def test_a_configuration_is_migrated(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    done = migrate([source], to="shard_fsdp")
    assert done.content["trainer"]["precision"] == "bf16-mixed"
    assert "shard_fsdp" in done.yaml
    assert "zero_optimization.stage" in done.table
    assert done.lost == []
    with pytest.raises(ConfigurationError, match="files is empty"):
        migrate([])
    with pytest.raises(ConfigurationError, match=r"no strategy 'fsdp'\. Did you mean (?!fsdp)"):
        migrate([source], to="fsdp")


@pytest.mark.matrix
def test_a_run_is_planned(tmp_path: Path) -> None:
    demo = "lightning.pytorch.demos.boring_classes"
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {demo}.BoringModel\ndata: {demo}.BoringDataModule\ntrainer: {{strategy: shard_fsdp}}\n")
    found = plan(run, device_memory="4GB", devices=2, options={"trainer.precision": "bf16-mixed"})
    assert found.fits
    assert found.configured.most.device.total > 0
    assert "fits: " in found.text
    assert not plan(run, device_memory="1KB", devices=2).fits
    with pytest.raises(UsageError, match="--nodes: got 0, but must be a whole number, 1 or more"):
        plan(run, device_memory="1GB", nodes=0)
    with pytest.raises(UsageError, match=r"nope\.yaml"):
        plan("nope.yaml", device_memory="1GB")
