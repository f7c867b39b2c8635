"""Fits that save in the background: what they resume from, and how they end while a save is under way."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import registry
from lightning_shard.checkpoint.files import tensor_files
from lightning_shard.checkpoint.files.commit import wait_for_background_saves
from lightning_shard.checkpoint.files.manifest import is_checkpoint
from lightning_shard.checkpoint.load import open_checkpoint
from lightning_shard.cluster.preemption import Preempted
from lightning_shard.errors import CheckpointError
from tests.harness import DistributedError, run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.resume.test_resume import _assert_continues, _fit
from tests.run.test_preemption import RUN, Told

ENGINES = {
    "shard_ddp_aligned": "bf16-mixed",
    "shard_ddp": "32-true",
    "shard_fsdp": "bf16-mixed",
    "shard_fsdp_hybrid": "32-true",
    "shard_fsdp_offload": "32-true",
    "shard_deepspeed_stage_1": "bf16-mixed",
    "shard_deepspeed_stage_2_offload": "bf16-mixed",
    "shard_deepspeed_stage_2": "32-true",
    "shard_deepspeed_stage_3_aligned": "bf16-mixed",
    "shard_deepspeed_stage_3_offload": "32-true",
}


def in_background(name: str) -> Any:
    """A strategy by its name, with ``async_save``."""
    strategy = registry.build(name)
    strategy.async_save = True
    return strategy


class Slow:
    """Saves take so long that steps are taken meanwhile: some 0.2 s, for about 2000 writes."""

    def __init__(self) -> None:
        self._number, self._write = itertools.count(), tensor_files.HashedFile.write

    def __enter__(self) -> None:
        def write(file: tensor_files.HashedFile, data: Any) -> int:
            if next(self._number) % 10 == 0:
                time.sleep(0.001)
            return self._write(file, data)

        tensor_files.HashedFile.write = write  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        tensor_files.HashedFile.write = self._write  # type: ignore[method-assign]


class Seen(pl.Callback):
    """At every step: whether a save was under way, and which whole checkpoints there were."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.during: list[list[str]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
        if any(trainer.strategy.checkpoints.saver.is_writing(self.folder / f"step={step}.ckpt") for step in range(20)):
            # By the manifest alone: reading would wait.
            self.during.append([name for name in names if (self.folder / name / "manifest.json").exists()])


def slow_fit_and_resume(names: dict[str, str], folder: str) -> list[Any]:
    results = []
    for name, precision in names.items():
        own, straight = f"{folder}/{name}", {"steps": 6, "precision": precision}
        seen = Seen(own)
        with Slow():
            whole_run = _fit(in_background(name), folder=own, every=2, callbacks=[seen], **straight)
        resumed = _fit(name, resume=f"{own}/step=2.ckpt", **straight)
        results.append((whole_run, resumed, len(seen.during)))
    return results


@pytest.mark.matrix
def test_resuming_from_a_save_beside_training_is_bitwise_going_on(tmp_path: Path) -> None:
    """Steps were taken, and tensors changed, while it was written."""
    for rank in run_distributed(slow_fit_and_resume, 2, ENGINES, str(tmp_path), timeout=400):
        for whole_run, resumed, steps_during in rank:
            assert steps_during > 0
            _assert_continues([whole_run], [resumed], 2)


class Paced(pl.Callback):
    """Every third step waits until what is being written is written, however fast steps are."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % 3 == 0:
            wait_for_background_saves()


def fit_without_end(folder: str) -> dict[str, Any]:
    """Two ``ModelCheckpoint``s that have a save due at every step."""
    strategy, begun = in_background("shard_fsdp"), []
    strategy.async_save = "continuous"
    top = ModelCheckpoint(f"{folder}/top", "{step}", "step", mode="max", every_n_train_steps=1)
    saver = strategy.checkpoints.saver
    save = saver.save

    def saving(path: Any, *args: Any, **kwargs: Any) -> None:
        begun.append((Path(path).parent.name, saver.is_busy))
        save(path, *args, **kwargs)

    saver.save = saving
    _fit(strategy, steps=18, callbacks=[top, Paced()], folder=f"{folder}/all", every=1)
    return {"begun": begun, "top": os.listdir(f"{folder}/top"), "all": len(os.listdir(f"{folder}/all"))}


@pytest.mark.matrix
def test_a_save_begins_when_the_last_one_ends(tmp_path: Path) -> None:
    first, second = run_distributed(fit_without_end, 2, str(tmp_path))
    assert first["begun"] == second["begun"], "ranks differ in when they save"
    names = [name for name, _ in first["begun"]]
    assert names == (["top", "all"] * 18)[: len(names)], "they don't take turns"
    assert len(names) >= 4
    # Training has waited for none; the last two may be those of its end.
    assert not any(busy for _, busy in first["begun"][:-2])
    assert len(first["top"]) == 1
    assert first["all"] == names.count("all")


class FailsOnRank1(TinyLM):
    """Rank 1 can't write any more from the third batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and self.trainer.global_rank == 1:

            def full(self: object, data: Any) -> int:
                raise OSError(28, "No space left on device")

            tensor_files.HashedFile.write = full  # type: ignore[method-assign]


def fit_that_fails(folder: str) -> dict[str, Any]:
    original, module, error = tensor_files.HashedFile.write, FailsOnRank1(), ""
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    trainer = quiet_trainer(
        strategy=in_background("shard_fsdp"), max_steps=500, enable_checkpointing=True, callbacks=[checkpoint]
    )
    try:
        trainer.fit(module, loader())
    except CheckpointError as failure:
        error = str(failure)
    finally:
        tensor_files.HashedFile.write = original  # type: ignore[method-assign]
    return {"error": error, "steps": len(module.losses)}


def test_a_fit_whose_save_fails_ends_on_all_ranks_at_one_step(tmp_path: Path) -> None:
    first, second = run_distributed(fit_that_fails, 2, str(tmp_path))
    assert first == second
    assert re.match(r"while writing .*step=4\.ckpt: rank 1: OSError: \[Errno 28\] No space left", first["error"])
    assert 4 <= first["steps"] < 500
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    open_checkpoint(tmp_path / "step=2.ckpt")


def preempted(folder: str) -> int | None:
    """Told to stop at the step after a save has begun in the background."""
    module = Told(("train", 2))

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(f"{folder}/step=3.ckpt")
                assert trainer.strategy.checkpoints.saver.is_writing(f"{folder}/step=3.ckpt")

    strategy = in_background("shard_ddp")
    trainer = quiet_trainer(strategy=strategy, default_root_dir=folder, max_steps=8, callbacks=[Save()])
    with Slow(), pytest.raises(Preempted) as stop:
        trainer.fit(module, loader(4, count=40))
    return stop.value.code


def test_preempted_while_a_save_is_under_way(tmp_path: Path) -> None:
    """The save of the stopped run comes behind it."""
    assert run_distributed(preempted, 2, str(tmp_path)) == [75, 75]
    own = tmp_path / "preempted" / f"{RUN}.ckpt"
    assert open_checkpoint(own).manifest.facts.run["step"] == 4
    assert is_checkpoint(tmp_path / "step=3.ckpt")


def interrupted(folder: str) -> None:
    """One rank raises while a save is under way."""

    class Fails(TinyLM):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and self.trainer.global_rank == 1:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2)
    trainer = quiet_trainer(
        strategy=in_background("shard_ddp"), max_steps=8, enable_checkpointing=True, callbacks=[checkpoint]
    )
    with Slow():
        trainer.fit(Fails(), loader())


@pytest.mark.matrix
def test_an_exception_lets_the_save_under_way_become_whole(tmp_path: Path) -> None:
    with pytest.raises(DistributedError) as caught:
        run_distributed(interrupted, 2, str(tmp_path), timeout=60)
    assert caught.value.failed[1] == "ValueError"
    open_checkpoint(tmp_path / "step=2.ckpt")
