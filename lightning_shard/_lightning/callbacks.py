"""A Trainer's callbacks: which watch gradients being dropped, what a summary counts, when ``ModelCheckpoint`` saves and
sees a checkpoint, and which one a run resumes from.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, ModelCheckpoint, ModelSummary
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary, summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard._lightning.loops import should_accumulate
from lightning_shard._lightning.replaced import Replacements


def callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks, an attribute that its class does not declare."""
    return list(vars(trainer)["callbacks"])


def watches_zero_grad(trainer: Trainer) -> bool:
    """Whether the module or a callback has a hook that Lightning calls where it drops gradients, or does so itself."""
    module = trainer.lightning_module
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks(trainer)
    )


def count_sharded_parameters(replacements: Replacements, trainer: Trainer) -> None:
    """Let ``ModelSummary`` callbacks count parameters that ZeRO-3 has sharded in full, and show each rank's shard.

    Lightning does so for its own DeepSpeed strategy alone.
    """

    def summary(depth: int, trainer: Trainer, module: LightningModule) -> Any:
        sharded = any(hasattr(p, "ds_numel") for p in module.parameters())
        return (DeepSpeedSummary if sharded else summarize)(module, max_depth=depth)

    for callback in callbacks(trainer):
        if isinstance(callback, ModelSummary):
            replacements.replace(callback, "_summary", partial(summary, callback._max_depth))


def leave_flat_groups_unnamed(replacements: Replacements, trainer: Trainer) -> None:
    """Let callbacks that freeze before the fit not look for the names of what is in an optimizer's groups."""
    for callback in callbacks(trainer):
        if isinstance(callback, BaseFinetuning):
            replacements.replace(callback, "_store", lambda *_: None)


_TRAINABLE = "trainable_parameters"


def thawed(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says of which parameters are trainable, where callbacks freeze and thaw."""
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks(trainer)):
        return {}
    named = trainer.lightning_module.named_parameters()
    return {_TRAINABLE: [name for name, parameter in named if parameter.requires_grad]}


def thaw_again(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give a resumed fit the trainable parameters and the optimizers' groups that the checkpoint's had.

    Lightning makes the groups when a fit starts, from state that it restores later under engines, and thaws nothing.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks(trainer):
        if isinstance(callback, BaseFinetuning) and callback.state_key in states and _TRAINABLE in checkpoint:
            callback.load_state_dict(states[callback.state_key])
            callback.on_fit_start(trainer, trainer.lightning_module)
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name in checkpoint[_TRAINABLE])


def let_errors_through(replacements: Replacements, trainer: Trainer) -> None:
    """Keep callbacks that save when a run fails from waiting for other ranks, and from hiding the run's error.

    A save is made by all ranks together. After an error the others may be anywhere, and so may the parameters of a
    unit whose forward was interrupted: several ranks save nothing, and one says why if it can't.
    """

    def on_exception(save: Any, name: str, trainer: Trainer, module: LightningModule, error: BaseException) -> None:
        reason = f"rank {trainer.global_rank} can't know where the others are" if trainer.world_size > 1 else ""
        try:
            if not reason:
                save(trainer, module, error)
        except Exception as failed:
            reason = str(failed)
        if reason:
            rank_zero_warn(
                f"{name} saved nothing after {type(error).__name__}: {reason}. Resume from the last checkpoint of a "
                "ModelCheckpoint with every_n_train_steps, or by ckpt_path: auto."
            )

    for callback in callbacks(trainer):
        if isinstance(callback, Checkpoint):
            save, name = callback.on_exception, type(callback).__name__
            replacements.replace(callback, "on_exception", partial(on_exception, save, name))


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
