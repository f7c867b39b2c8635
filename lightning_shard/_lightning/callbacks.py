"""A Trainer's callbacks: hooks at dropped gradients, the moment of ``ModelCheckpoint``'s saves, the checkpoint that a
run resumes from, and states of callbacks.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as stock
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary

from lightning_shard._lightning import Replacements
from lightning_shard._lightning.loops import counted_in_batch, should_accumulate


def callbacks_of(trainer: Trainer, kind: Any = object) -> list[Any]:
    """The Trainer's callbacks of a class, or of a union. Trainer does not declare the attribute for type checkers."""
    return [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, kind)]


def watches_zero_grad(trainer: Trainer) -> bool:
    """Whether the module or a callback overrides a hook at the drop of gradients, or the drop itself."""
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


def trainable_state(trainer: Trainer) -> dict[str, Any]:
    """A checkpoint's entry with the trainable parameters' names, if callbacks freeze and thaw."""
    if not callbacks_of(trainer, stock.BaseFinetuning):
        return {}
    named = trainer.lightning_module.named_parameters()
    return {_TRAINABLE: [name for name, parameter in named if parameter.requires_grad]}


def restore_trainable(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give a resumed fit the checkpoint's trainable parameters and optimizer groups. Lightning would make the groups
    before it restores the callbacks' states, and thaws nothing.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks_of(trainer, stock.BaseFinetuning):
        if callback.state_key in states and _TRAINABLE in checkpoint:
            callback.load_state_dict(states[callback.state_key])
            callback.on_fit_start(trainer, trainer.lightning_module)
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name in checkpoint[_TRAINABLE])


def let_checkpoints_wait(
    replacements: Replacements, trainer: Trainer, *, is_writing: Callable[[str], bool], link: Callable[[str, str], None]
) -> None:
    """Let ``ModelCheckpoint`` callbacks know of a checkpoint that is written in the background. Its path is taken while
    ``is_writing(path)``. ``link`` links the second path to the first once the first is full. All ranks call it.
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


class HeldSaves:
    """Holds the saving hooks of ``ModelCheckpoint`` callbacks until the module's own hook has run and no gradients wait
    for a step. A save that is due before that, or while another one is written, follows the first step that allows it,
    one callback after the other, or the end of training.
    """

    def __init__(self) -> None:
        self._callbacks: list[stock.ModelCheckpoint] = []
        self._asked: dict[stock.ModelCheckpoint, Callable[[], None]] = {}  # Lightning has called their hooks.
        self._validated: dict[stock.ModelCheckpoint, Callable[[], None]] = {}  # They are due since a validation.
        self._late: dict[stock.ModelCheckpoint, None] = {}  # They are due by their number of steps, the oldest first.

    def hold_saves(self, replacements: Replacements, trainer: Trainer, busy: Callable[[], bool]) -> None:
        """Hold the saves of a fit. ``busy``: whether the Trainer has to wait for another save (same on all ranks)."""
        HeldSaves.__init__(self)
        self._trainer, self._busy = trainer, busy
        self._callbacks = callbacks_of(trainer, stock.ModelCheckpoint)
        for callback in self._callbacks:
            replacements.wrap(callback, "on_train_batch_end", partial(self._hold_hook, callback))
            replacements.wrap(callback, "on_validation_end", partial(self._hold_hook, callback))

    def _hold_hook(self, callback: stock.ModelCheckpoint, hook: Callable[..., None], *given: Any) -> None:
        self._asked[callback] = partial(hook, *given)

    def after_batch(self) -> None:
        """Make the saves that are due between a training batch and a validation. All ranks call it."""
        asked, self._asked = self._asked, {}
        if should_accumulate(self._trainer) or not (asked or self._validated or self._late):
            return
        with counted_in_batch(self._trainer):
            for callback in [*self._late, *(one for one in self._callbacks if one not in self._late)]:
                self._save_after_step(callback, asked.get(callback))

    def _save_after_step(self, callback: stock.ModelCheckpoint, asked: Callable[[], None] | None) -> None:
        every, stops = callback._every_n_train_steps, self._trainer.should_stop
        # Save before the validation that follows a stop: a resumed run would lack its random draws.
        if self._busy() and not stops:
            if asked is not None and every > 0 and self._trainer.global_step % every == 0:
                self._late.setdefault(callback)
            return
        self._save_due(callback)
        if asked is not None and (stops or not self._busy()):
            asked()

    def _save_due(self, callback: stock.ModelCheckpoint) -> None:
        if (save := self._validated.pop(callback, None)) is not None:
            save()
        if callback in self._late:
            del self._late[callback]
            every, callback._every_n_train_steps = callback._every_n_train_steps, 1
            try:
                # An overridden hook is called at its own steps alone.
                module = self._trainer.lightning_module
                stock.ModelCheckpoint.on_train_batch_end(callback, self._trainer, module, None, None, 0)
            finally:
                callback._every_n_train_steps = every

    def after_validation(self) -> None:
        """Make the saves that are due at the end of a fit's validation. All ranks call it."""
        asked, self._asked = self._asked, {}
        for callback, save in asked.items():
            if should_accumulate(self._trainer) or self._busy():
                self._validated[callback] = save
            else:
                save()

    def after_training(self) -> None:
        """Make the saves that are still due. All ranks call it."""
        for callback in self._callbacks:
            self._save_due(callback)


def choose_checkpoint(replacements: Replacements, trainer: Trainer, choose: Callable[[Any], Any]) -> None:
    """Resume from ``choose(ckpt_path)``, None for nothing, instead of from ``ckpt_path``."""

    def resume_start(start: Callable[..., None], checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        start(choose(checkpoint_path), weights_only=weights_only)

    replacements.wrap(trainer._checkpoint_connector, "resume_start", resume_start)


def apply_accumulation_schedule(trainer: Trainer) -> None:
    """Have a schedule of accumulated batches set the number in mid-epoch too. Lightning does it at an epoch's start."""
    for callback in callbacks_of(trainer, stock.GradientAccumulationScheduler):
        callback.on_train_epoch_start(trainer)


def restore_callback_states(trainer: Trainer, checkpoint: Mapping[str, Any], kind: Any) -> None:
    """Restore the callbacks of a class from ``checkpoint``."""
    for callback in callbacks_of(trainer, kind):
        if (state := checkpoint.get("callbacks", {}).get(callback.state_key)) is not None:
            callback.load_state_dict(state)
