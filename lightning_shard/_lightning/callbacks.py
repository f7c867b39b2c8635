"""A Trainer's callbacks: those that watch gradients being dropped, when ``ModelCheckpoint`` saves and which
checkpoint a run resumes from.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard._lightning import Replacements
from lightning_shard._lightning.loops import should_accumulate


def callbacks_of(trainer: Trainer, kind: Any = object) -> list[Any]:
    """The Trainer's callbacks of a class, or of one of several; its own class does not declare the attribute."""
    return [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, kind)]


def watches_zero_grad(trainer: Trainer) -> bool:
    """Whether the module or a callback has a hook that Lightning calls where it drops gradients, or does so itself."""
    module, hooks = trainer.lightning_module, ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks_of(trainer)
    )


def count_partitioned(replacements: Replacements, trainer: Trainer) -> None:
    """Let ``ModelSummary`` callbacks count parameters that ZeRO-3 has sharded, as under Lightning's own strategy."""
    for callback in callbacks_of(trainer, stock.ModelSummary):
        summary = lambda _, module, depth=callback._max_depth: DeepSpeedSummary(module, max_depth=depth)  # noqa: E731
        replacements.replace(callback, "_summary", summary)


_TRAINABLE = "trainable_parameters"


def thawed(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says of which parameters are trainable, where callbacks freeze and thaw."""
    if not callbacks_of(trainer, stock.BaseFinetuning):
        return {}
    named = trainer.lightning_module.named_parameters()
    return {_TRAINABLE: [name for name, parameter in named if parameter.requires_grad]}


def thaw_again(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give a resumed fit the trainable parameters and the optimizers' groups that the checkpoint's had: Lightning makes
    groups before it restores under engines what they follow from, and thaws nothing.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks_of(trainer, stock.BaseFinetuning):
        if callback.state_key in states and _TRAINABLE in checkpoint:
            callback.load_state_dict(states[callback.state_key])
            callback.on_fit_start(trainer, trainer.lightning_module)
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name in checkpoint[_TRAINABLE])


def let_errors_through(replacements: Replacements, trainer: Trainer) -> None:
    """Keep callbacks that save when a run fails from waiting for other ranks, and from hiding the run's error: all
    ranks save together, and after an error the others may be anywhere. One says why it can't save.
    """

    def on_exception(name: str, save: Any, trainer: Trainer, module: LightningModule, error: BaseException) -> None:
        reason = f"rank {trainer.global_rank} can't know where the others are" if trainer.world_size > 1 else ""
        try:
            if not reason:
                save(trainer, module, error)
        except Exception as failed:
            reason = str(failed)
        if reason and trainer.global_step:
            rank_zero_warn(
                f"{name} saved nothing after {type(error).__name__}: {reason}. Resume from the last checkpoint of a "
                "ModelCheckpoint with every_n_train_steps, or by ckpt_path: auto."
            )

    for callback in callbacks_of(trainer, stock.Checkpoint):
        replacements.wrap(callback, "on_exception", partial(on_exception, type(callback).__name__))


def let_checkpoints_wait(
    replacements: Replacements, trainer: Trainer, *, is_writing: Callable[[str], bool], link: Callable[[str, str], None]
) -> None:
    """Let ``ModelCheckpoint`` callbacks know of a checkpoint that is written in the background: while ``is_writing``,
    its path is taken. ``link`` links the second path to the first once that is full; all ranks call it.
    """

    def file_exists(exists: Callable[..., bool], filepath: Any, trainer: Trainer) -> bool:
        return exists(filepath, trainer) or is_writing(os.fspath(filepath))  # the first is a collective

    def link_checkpoint(link_now: Callable[..., None], trainer: Trainer, filepath: str, linkpath: str) -> None:
        if is_writing(filepath):
            link(filepath, linkpath)
        else:
            link_now(trainer, filepath, linkpath)

    for callback in callbacks_of(trainer, stock.ModelCheckpoint):
        replacements.wrap(callback, "file_exists", file_exists)
        replacements.wrap(callback, "_link_checkpoint", link_checkpoint)


def save_between_steps(replacements: Replacements, trainer: Trainer, busy: Callable[[], bool]) -> None:
    """Let ``ModelCheckpoint`` callbacks save after an optimizer step, when there are no gradients to save, and after
    the module's own hook. What is due before that, or while the Trainer is ``busy`` with another save (the same on all
    ranks), is saved after the first step that allows it, one callback after the other, or at the end of training.
    """
    queue: list[stock.ModelCheckpoint] = []  # which were due by their number of steps

    def follow(callback: stock.ModelCheckpoint) -> None:
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
            every, stops = callback._every_n_train_steps, trainer.should_stop
            # A stop is followed by a validation, whose draws a run that goes on lacks: what is due is saved before.
            if not stops and (busy() or (queue and queue[0] is not callback)):
                if every > 0 and trainer.global_step % every == 0 and callback not in queue:
                    queue.append(callback)
                return
            save_due(trainer, module)
            if stops or not busy():
                after_batch(trainer, module, *batch, **more)

        def on_train_end(trainer: Trainer, module: LightningModule) -> None:
            save_due(trainer, module)
            at_end(trainer, module)

        replacements.replace(callback, "on_train_batch_end", partial(after_module_batch, on_train_batch_end))
        replacements.replace(callback, "on_validation_end", partial(after_module_validation, on_validation_end))
        replacements.replace(callback, "on_train_end", on_train_end)

    after_module_batch = _after_module(replacements, trainer, "on_train_batch_end")
    after_module_validation = _after_module(replacements, trainer, "on_validation_end")
    for callback in callbacks_of(trainer, stock.ModelCheckpoint):
        follow(callback)


def _after_module(replacements: Replacements, trainer: Trainer, hook: str) -> Callable[..., None]:
    """A function that calls what it is given after the module's own ``hook``: Lightning calls callbacks before it."""
    module, waiting = trainer.lightning_module, list[Callable[[], None]]()

    def module_hook(own: Callable[..., None], *batch: Any, **more: Any) -> None:
        own(*batch, **more)
        while waiting:
            waiting.pop(0)()

    if not is_overridden(hook, module):
        return lambda call, *args, **more: call(*args, **more)
    replacements.wrap(module, hook, module_hook)
    return lambda call, *args, **more: waiting.append(partial(call, *args, **more))


def choose_checkpoint(replacements: Replacements, trainer: Trainer, choose: Callable[[Any], Any]) -> None:
    """Resume from ``choose(ckpt_path)``, None for nothing, where Lightning would resume from ``ckpt_path``."""

    def resume_start(start: Callable[..., None], checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        start(choose(checkpoint_path), weights_only=weights_only)

    replacements.wrap(trainer._checkpoint_connector, "resume_start", resume_start)


def go_on_in_mid_epoch(trainer: Trainer) -> None:
    """Have a schedule of the batches to accumulate do in mid-epoch too what it does as an epoch begins, which Lightning
    forgets.
    """
    for callback in callbacks_of(trainer, stock.GradientAccumulationScheduler):
        callback.on_train_epoch_start(trainer)


def restore_states(trainer: Trainer, checkpoint: Mapping[str, Any], kind: Any) -> None:
    """Give the callbacks of a class the states that ``checkpoint`` has of them."""
    for callback in callbacks_of(trainer, kind):
        if (state := checkpoint.get("callbacks", {}).get(callback.state_key)) is not None:
            callback.load_state_dict(state)
