"""A path that ends in ``full.ckpt``: one file, saved from training under every engine."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard.checkpoint.inspect import open_any, verify
from lightning_shard.errors import CheckpointError
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.foreign.stock import fit, state_of
from tests.groups import sampled
from tests.harness import run_distributed

# Saving one file from training


def save_full(strategy: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two epochs with a one-file checkpoint after each, of which the last is kept; then go on from that file."""
    callback = ModelCheckpoint(folder, "{epoch}.full", save_top_k=1, monitor="epoch", mode="max")
    first = fit(strategy, 2, callbacks=[callback], enable_checkpointing=True)
    first.save_checkpoint(f"{folder}/portable.ckpt")
    names = sorted(os.listdir(folder))
    resumed = fit(strategy, 4, ckpt_path=callback.best_model_path)
    return state_of(resumed), state_of(fit(strategy, 4)), names


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp"], 1))
def test_a_path_that_ends_in_full_becomes_one_file(tmp_path: Path, strategy: str) -> None:
    for resumed, whole_run, names in run_distributed(save_full, 2, strategy, str(tmp_path)):
        assert names == ["epoch=1.full.ckpt", "portable.ckpt"]
        assert_equal(resumed, whole_run)
    full, portable = tmp_path / "epoch=1.full.ckpt", tmp_path / "portable.ckpt"
    assert_equal(stored(full), stored(portable))
    assert open_any(full).facts.engine == open_any(portable).facts.engine
    found = torch.load(full, weights_only=True)
    assert found["hyper_parameters"] == {"extra": 1.0}
    assert found["pytorch-lightning_version"] == pl.__version__
    assert verify(full) == ["epoch=1.full.ckpt"]


def save_full_in_vain(folder: str) -> tuple[str, list[str]]:
    trainer = fit("shard_fsdp", 1)
    try:
        trainer.save_checkpoint(f"{folder}/taken.full.ckpt")
    except CheckpointError as error:
        return str(error), sorted(os.listdir(folder))
    return "saved", []


@pytest.mark.filterwarnings("ignore")
def test_a_one_file_save_that_fails_fails_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.full.ckpt").mkdir()
    (tmp_path / "taken.full.ckpt" / "mine.txt").write_text("mine")
    first, second = run_distributed(save_full_in_vain, 2, str(tmp_path))
    assert first[0] == second[0]
    assert "taken.full.ckpt is a directory with files that no checkpoint has" in first[0]
    assert os.listdir(tmp_path) == ["taken.full.ckpt"]
    assert os.listdir(tmp_path / "taken.full.ckpt") == ["mine.txt"]
