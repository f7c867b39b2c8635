"""The one-file form: there and back bitwise, and as stock Lightning would have saved it."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES, other_form
from lightning_shard.checkpoint.foreign import lightning_file
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.nets import build, save_trained, step
from tests.checkpoint.test_commit import save_number
from tests.harness import run_distributed

# The full form


@pytest.mark.parametrize(
    ("path", "full"),
    [
        ("runs/last.full.ckpt", True),
        ("epoch=0-step=2.full-v1.ckpt", True),  # as ModelCheckpoint calls a second one of the same name
        ("epoch=0-step=2.full-v12.ckpt", True),
        ("full.ckpt", False),
        ("a.fuller.ckpt", False),
        ("a.full.ckpt/model.ckpt", False),
    ],
)
def test_the_name_says_the_form(path: str, full: bool) -> None:
    assert (other_form(path) == "full") is full


def test_full_and_back_is_bitwise_the_same(tmp_path: Path, trained: Path) -> None:
    write_full(tmp_path / "full.ckpt", open_any(trained))
    write_portable(tmp_path / "back.ckpt", open_any(tmp_path / "full.ckpt"))
    assert_equal(stored(tmp_path / "back.ckpt"), stored(trained))
    before, after = open_portable(trained), open_portable(tmp_path / "back.ckpt")
    assert after.aliases == before.aliases == {"model.head.weight": "model.embed.weight"}
    assert after.facts == dataclasses.replace(before.facts, run={}, world_size=1)
    # Positions of loaders are kept by rank, in a part of their own that this checkpoint does not have.
    assert before.trainer_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader") == [{"at": 5}]
    assert after.trainer_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader") == []
    assert after.trainer_state == before.trainer_state


def test_the_full_form_is_what_torch_would_have_saved(tmp_path: Path, trained: Path) -> None:
    """The module and the optimizer themselves, trained in the same way, give these dictionaries."""
    write_full(tmp_path / "full.ckpt", open_any(trained))
    found = torch.load(tmp_path / "full.ckpt", weights_only=True)
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    assert_equal(found["state_dict"], net.state_dict())
    (state,) = found["optimizer_states"]
    expected = optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, slots in expected["state"].items():
        assert_equal(state["state"][number], slots)


def test_a_sharded_checkpoint_becomes_one_file(tmp_path: Path) -> None:
    path = tmp_path / "sharded.ckpt"
    written = run_distributed(save_trained, 2, str(path), "fsdp-2")[0]
    write_full(tmp_path / "full.ckpt", open_any(path))
    assert_equal(stored(tmp_path / "full.ckpt"), written)


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


def test_a_full_file_replaces_what_is_there_only_when_it_is_whole(tmp_path: Path, trained: Path) -> None:
    target = tmp_path / "full.ckpt"
    write_full(target, open_any(trained))
    before = target.read_bytes()
    checkpoint = open_any(trained)
    (trained / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointCorruptError, match="No such file"):
        write_full(target, checkpoint)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["full.ckpt", "trained.ckpt"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="files that no checkpoint has"):
        write_full(tmp_path / "folder", checkpoint)


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
