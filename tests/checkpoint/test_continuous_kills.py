"""A fit that always saves is killed in each phase of a save: what is under its names is whole, and goes on bitwise."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import registry
from lightning_shard.checkpoint import save
from lightning_shard.checkpoint.background import HostBuffers
from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.manifest import Manifest, read_manifest
from lightning_shard.checkpoint.inspect import verify
from tests.checkpoint.test_background_fits import Paced
from tests.harness import DistributedError, run_distributed
from tests.resume.test_resume import _assert_continues, _fit

# Phase to what is called in it, and the rank that is killed. Files of a save, and its names, are rank 0's to change.
PHASES: dict[str, tuple[Any, str, int]] = {
    "tensors are copied": (HostBuffers, "copy", 1),
    "tensors are written": (save, "write_boxes", 1),
    "the manifest is written": (Manifest, "to_json", 0),
    "names are exchanged": (commit, "_replace", 0),
    "leftovers are deleted": (commit, "_delete_leftovers", 0),
    "the one before is removed": (commit, "remove_checkpoint", 0),
}
KILLED = 2  # In this call.
STEPS = 40


def step_of(path: Path) -> int:
    return int(read_manifest(path).facts.run["step"])


def killed_fit(folder: str, phase: str, after: bool) -> None:
    """Two ``ModelCheckpoint``s that have a save due at every step; ``published`` gets the step of each whole one."""
    owner, name, rank = PHASES[phase]
    act, publish, calls = getattr(owner, name), commit.publish_checkpoint, itertools.count(1)

    def acting(*args: Any, **kwargs: Any) -> Any:
        mine = dist.get_rank() == rank and next(calls) == KILLED
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act(*args, **kwargs)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def publishing(temporary: Any, path: Any, token: str) -> None:
        publish(temporary, path, token)
        with open(f"{folder}/published", "a") as stream:
            stream.write(f"{step_of(path)}\n")

    commit.publish_checkpoint = publishing
    setattr(owner, name, acting)
    strategy = registry.build("shard_fsdp")
    strategy.async_save = "continuous"
    top = ModelCheckpoint(f"{folder}/top", "{step}", "step", mode="max", every_n_train_steps=1, save_last=True)
    _fit(strategy, steps=1000, callbacks=[top, Paced()], folder=f"{folder}/all", every=1)


@pytest.fixture(scope="module")
def whole_run() -> Any:
    return run_distributed(_fit, 2, "shard_fsdp", steps=STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_a_phase(tmp_path: Path, whole_run: Any, phase: str, after: bool) -> None:
    with pytest.raises(DistributedError) as caught:
        run_distributed(killed_fit, 2, str(tmp_path), phase, after, timeout=120)
    rank = PHASES[phase][2]
    assert caught.value.failed[rank] == "died"
    assert caught.value.failed[1 - rank] != "did not end"
    left = [path for path in tmp_path.glob("*/*.ckpt") if not path.name.startswith(".")]
    for path in left:
        verify(path)
    newest = max(left, key=step_of)
    since, published = step_of(newest), (tmp_path / "published").read_text().split()
    assert since >= int(published[-1])
    resumed = run_distributed(_fit, 2, "shard_fsdp", resume=str(newest), steps=STEPS)
    _assert_continues(whole_run, resumed, since)
