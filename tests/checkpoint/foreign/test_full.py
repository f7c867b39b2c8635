"""The one-file form: there and back bitwise, and as stock Lightning would have saved it."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES
from lightning_shard.checkpoint.foreign import lightning_file
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import open_any, verify
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.foreign.stock import fit, state_of
from tests.checkpoint.nets import build, step
from tests.checkpoint.test_commit import save_number
from tests.harness import run_distributed


def test_full_and_back_is_bitwise_the_same(tmp_path: Path, trained: Path) -> None:
    write_full(tmp_path / "full.ckpt", open_any(trained))
    write_portable(tmp_path / "back.ckpt", open_any(tmp_path / "full.ckpt"))
    assert_equal(stored(tmp_path / "back.ckpt"), stored(trained))
    before, after = open_portable(trained), open_portable(tmp_path / "back.ckpt")
    assert after.aliases == before.aliases == {"model.head.weight": "model.embed.weight"}
    assert after.facts == dataclasses.replace(before.facts, run={}, world_size=1)
    assert before.trainer_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader") == [{"at": 5}]
    assert after.trainer_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader") == []
    assert after.trainer_state == before.trainer_state


def test_stock_optimizer_state_needs_names(tmp_path: Path) -> None:
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    torch.save({"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"a\.ckpt numbers the parameters .* ckpt_path="):
        open_any(tmp_path / "a.ckpt")
    weights = open_any(tmp_path / "a.ckpt", optimizers="none")
    assert OPTIMIZER_STATES not in weights.trainer_state
    assert weights.aliases == {"model.head.weight": "model.embed.weight"}
    assert_equal(
        {key.removeprefix("model."): tensor.read() for key, tensor in weights.tensors.items()},
        {key: tensor for key, tensor in net.state_dict().items() if key != "head.weight"},
    )
    assert "optimizer.0.#0.exp_avg" in open_any(tmp_path / "a.ckpt", optimizers="numbered").tensors


def test_a_full_file_replaces_another_only_when_it_is_whole(tmp_path: Path, trained: Path) -> None:
    target = tmp_path / "full.ckpt"
    write_full(target, open_any(trained))
    before = target.read_bytes()
    checkpoint = open_any(trained)
    (trained / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointCorruptError, match="No such file"):
        write_full(target, checkpoint)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["full.ckpt", "trained.ckpt"]


def test_a_save_that_fails_or_was_killed_leaves_nothing_for_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    """Its parts are a checkpoint of their own, which the failing write has open."""

    def full_disk(path: Path, tree: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(lightning_file, "write_archive", full_disk)
        with pytest.raises(CheckpointError, match="no space left"):
            save_number(tmp_path / "a.full.ckpt", 1.0, saver=Saver())
    assert os.listdir(tmp_path) == []
    (tmp_path / "..a.full.ckpt.tmp-0123456789ab.tmp-ab0123456789").mkdir()
    save_number(tmp_path / "a.full.ckpt", 1.0, saver=Saver())
    assert os.listdir(tmp_path) == ["a.full.ckpt"]


def save_full(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two epochs with a one-file checkpoint after each, of which the last is kept; then go on from that file."""
    callback = ModelCheckpoint(folder, "{epoch}.full", save_top_k=1, monitor="epoch", mode="max")
    first = fit("shard_fsdp", 2, callbacks=[callback], enable_checkpointing=True)
    first.save_checkpoint(f"{folder}/portable.ckpt")
    names = sorted(os.listdir(folder))
    resumed = fit("shard_fsdp", 4, ckpt_path=callback.best_model_path)
    return state_of(resumed), state_of(fit("shard_fsdp", 4)), names


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_a_path_that_ends_in_full_becomes_one_file(tmp_path: Path) -> None:
    for resumed, whole_run, names in run_distributed(save_full, 2, str(tmp_path)):
        assert names == ["epoch=1.full.ckpt", "portable.ckpt"]
        assert_equal(resumed, whole_run)
    full, portable = tmp_path / "epoch=1.full.ckpt", tmp_path / "portable.ckpt"
    assert_equal(stored(full), stored(portable))
    assert open_any(full).facts.engine == open_any(portable).facts.engine
    found = torch.load(full, weights_only=True)
    assert found["hyper_parameters"] == {"extra": 1.0}
    assert found["pytorch-lightning_version"] == pl.__version__
    assert verify(full) == ["epoch=1.full.ckpt"]
