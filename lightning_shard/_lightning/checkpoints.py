"""When ``ModelCheckpoint`` saves and sees a checkpoint, and which one a run resumes from."""

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard._lightning.loops import should_accumulate
from lightning_shard._lightning.replaced import Replacements


def let_checkpoints_wait(
    replacements: Replacements, trainer: Trainer, *, is_writing: Callable[[str], bool], link: Callable[[str, str], None]
) -> None:
    """Let ``ModelCheckpoint`` callbacks know of a checkpoint that is written in the background.

    ``is_writing`` says whether the one at a path still is: its name is taken, as if it were there. ``link`` makes the
    second path a link to the first (``save_last="link"``) once that is full; all ranks call it.
    """

    def follow(callback: ModelCheckpoint) -> None:
        exists_already, link_now = callback.file_exists, callback._link_checkpoint

        def file_exists(filepath: Any, trainer: Trainer) -> bool:
            exists = exists_already(filepath, trainer)  # a collective
            return exists or is_writing(os.fspath(filepath))

        def link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
            if is_writing(filepath):
                link(filepath, linkpath)
            else:
                link_now(trainer, filepath, linkpath)

        replacements.replace(callback, "file_exists", file_exists)
        replacements.replace(callback, "_link_checkpoint", link_checkpoint)

    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            follow(callback)


def save_between_steps(replacements: Replacements, trainer: Trainer, busy: Callable[[], bool]) -> None:
    """Let ``ModelCheckpoint`` callbacks save after an optimizer step, not among the batches that one accumulates.

    What is due in between, after a validation or by the clock, is saved right after the step, so that there
    are no gradients to save. What is due while the Trainer is ``busy`` with another save, the same on all ranks, is
    saved after the first step at which it is not, one callback after the other; at the end of training in any case.
    """
    queue: list[ModelCheckpoint] = []  # which were due by their number of steps

    def follow(callback: ModelCheckpoint) -> None:
        after_batch, after_validation = callback.on_train_batch_end, callback.on_validation_end
        at_end, due = callback.on_train_end, [False]

        def on_validation_end(trainer: Trainer, module: LightningModule) -> None:
            due[0] = not trainer.sanity_checking and (should_accumulate(trainer) or busy())
            if not due[0]:
                after_validation(trainer, module)

        def save_due(trainer: Trainer, module: LightningModule) -> None:
            if due[0]:
                due[0] = False
                after_validation(trainer, module)
            candidates = callback._monitor_candidates(trainer)
            if callback in queue and (callback.monitor is None or callback.monitor in candidates):
                queue.remove(callback)
                if not callback._should_skip_saving_checkpoint(trainer):
                    callback._save_topk_checkpoint(trainer, candidates)
                    callback._save_last_checkpoint(trainer, candidates)

        def on_train_batch_end(trainer: Trainer, module: LightningModule, *batch: Any, **more: Any) -> None:
            if should_accumulate(trainer):
                return
            every = callback._every_n_train_steps
            if busy() or (queue and queue[0] is not callback):
                if every > 0 and trainer.global_step % every == 0 and callback not in queue:
                    queue.append(callback)
                return
            save_due(trainer, module)
            if not busy():
                after_batch(trainer, module, *batch, **more)

        def on_train_end(trainer: Trainer, module: LightningModule) -> None:
            save_due(trainer, module)
            at_end(trainer, module)

        replacements.replace(callback, "on_train_batch_end", on_train_batch_end)
        replacements.replace(callback, "on_validation_end", on_validation_end)
        replacements.replace(callback, "on_train_end", on_train_end)

    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            follow(callback)


def choose_checkpoint(replacements: Replacements, trainer: Trainer, choose: Callable[[Any], Any]) -> None:
    """Resume from ``choose(ckpt_path)``, None for nothing, where Lightning would resume from ``ckpt_path``."""
    connector = trainer._checkpoint_connector
    start = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        start(choose(checkpoint_path), weights_only=weights_only)

    replacements.replace(connector, "resume_start", resume_start)
