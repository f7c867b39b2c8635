"""A Trainer's callbacks: those that watch gradients being dropped, when ``ModelCheckpoint`` saves and which
checkpoint a run resumes from, and averages of weights, which are given this rank's shards.
"""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard._lightning import Replacements
from lightning_shard._lightning.loops import should_accumulate


def callbacks(trainer: Trainer, kind: Any = object) -> list[Any]:
    """The Trainer's callbacks of a class, or of one of several; its own class does not declare the attribute."""
    return [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, kind)]


def watches_zero_grad(trainer: Trainer) -> bool:
    """Whether the module or a callback has a hook that Lightning calls where it drops gradients, or does so itself."""
    module, hooks = trainer.lightning_module, ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks(trainer)
    )


_TRAINABLE = "trainable_parameters"


def thawed(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says of which parameters are trainable, where callbacks freeze and thaw."""
    if not callbacks(trainer, stock.BaseFinetuning):
        return {}
    named = trainer.lightning_module.named_parameters()
    return {_TRAINABLE: [name for name, parameter in named if parameter.requires_grad]}


def thaw_again(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give a resumed fit the trainable parameters and the optimizers' groups that the checkpoint's had: Lightning makes
    groups before it restores under engines what they follow from, and thaws nothing.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks(trainer, stock.BaseFinetuning):
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

    for callback in callbacks(trainer, stock.Checkpoint):
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

    for callback in callbacks(trainer, stock.ModelCheckpoint):
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
    for callback in callbacks(trainer, stock.ModelCheckpoint):
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


_HOOKS = {stock.WeightAveraging: ("setup", "on_load_checkpoint"), stock.StochasticWeightAveraging: ("setup",)}
"""Hooks that copy or load a whole module."""


@dataclass(frozen=True, kw_only=True)
class Average:
    shards: nn.Module  # Copies of this rank's boxes, in the same order.
    has_buffers: bool  # Whether the buffers are averaged, or follow the module's; else those here mean nothing.
    count: Callable[[], int]  # How many updates are in it.
    set_count: Callable[[int], object]


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    return callbacks(trainer, tuple(_HOOKS))


def averages_place(callbacks: Any) -> str | None:
    """Where those that average weights keep averages: "beside" the weights or on the "host"; None: there are none."""
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    averaging: list[Any] = [callback for callback in given if isinstance(callback, tuple(_HOOKS))]
    return ("host" if str(averaging[0]._device).startswith("cpu") else "beside") if averaging else None


def evaluates_average(trainer: Trainer) -> bool:
    """Whether a checkpoint's averages are evaluated, as those of Lightning's are, and not its weights."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    return not fitting and bool(callbacks(trainer, stock.WeightAveraging))


def collects_statistics(trainer: Trainer) -> bool:
    """Whether ``StochasticWeightAveraging`` makes its last pass over the data, for batch norms, without gradients."""
    ends = [callback.swa_end + 1 for callback in callbacks(trainer, stock.StochasticWeightAveraging)]
    return trainer.current_epoch in ends


def go_on_in_mid_epoch(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Have callbacks, with the checkpoint's ``states``, do in mid-epoch too what they do as an epoch begins, which
    Lightning forgets: a number of batches to accumulate, the scheduler of ``StochasticWeightAveraging``; learning rates
    stay the checkpoint's.
    """
    for callback in callbacks(trainer, stock.GradientAccumulationScheduler):
        callback.on_train_epoch_start(trainer)
    for callback in callbacks(trainer, stock.StochasticWeightAveraging):
        begun = states.get(callback.state_key, {}).get("scheduler_state") is not None
        if trainer.fit_loop.restarted_mid_epoch and begun:
            groups = trainer.optimizers[0].param_groups
            kept = [(group["lr"], group.get("initial_lr")) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, (lr, initial_lr) in zip(groups, kept, strict=True):
                group.update(lr=lr, initial_lr=initial_lr)


def own_averaging_hooks(callback: Callback) -> list[str]:
    """Names of the replaced hooks that a subclass has its own of, which would not be called."""
    stock = [(cls, name) for cls, names in _HOOKS.items() if isinstance(callback, cls) for name in names]
    return [name for cls, name in stock if getattr(type(callback), name) is not getattr(cls, name)]


def recount_averages(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """In a fit that goes back to ``checkpoint``, count updates of averages from there on."""
    for callback in averaging_callbacks(trainer):
        if (state := checkpoint.get("callbacks", {}).get(callback.state_key)) is not None:
            type(callback).load_state_dict(callback, state)  # the class's: the schedule that goes on stays
            if getattr(callback, "n_averaged", None) is not None:
                callback.n_averaged.fill_(state["n_averaged"])


def leave_out_copies(replacements: Replacements, trainer: Trainer) -> None:
    """Before the callbacks are set up: keep them from copying the module, and from loading what is in no state dict."""
    for cls, names in _HOOKS.items():
        for callback in callbacks(trainer, cls):
            for name in names:
                replacements.replace(callback, name, lambda *args, **kwargs: None)


class _Count(int):
    """A number that torch takes for a tensor; the host knows it, and a device is given it, without a wait."""

    def to(self, device: Any) -> Tensor:
        return torch.full((), int(self), device=device)

    def __add__(self, more: int) -> "_Count":
        return _Count(int(self) + more)


Current = Callable[[], nn.Module]
Write = Callable[..., None]


class _InItsPlace(LightningModule):
    """What a callback is set up with in the module's place, and makes its average of: a copy of ``current``."""

    device = None  # type: ignore[assignment] # each box of it stays where it is, unless the callback has a device

    def __init__(self, current: Current) -> None:
        super().__init__()
        self.current = current

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return deepcopy(self.current())


def average_shards(replacements: Replacements, trainer: Trainer, current: Current, write: Write) -> Average:
    """Have the one averaging callback average this rank's boxes, ``current``; ``write`` has a function write there."""
    (callback,) = averaging_callbacks(trainer)
    replacements.replace(callback, "_average_model", None)  # which it makes now, and an end of the run takes
    type(callback).setup(callback, trainer, _InItsPlace(current), "fit")
    average = callback._average_model
    if isinstance(callback, stock.StochasticWeightAveraging):
        return _stochastic(replacements, trainer, average, current, write)
    update, average.update_parameters = average.update_parameters, lambda module: update(current())
    del average.n_averaged  # a buffer
    average.n_averaged = _Count(0)
    replacements.wrap(callback, "_swap_models", lambda swap, module: write(swap, swaps=True))
    replacements.wrap(callback, "_copy_average_to_current", lambda copy, module: write(copy))
    count, set_count = lambda: int(average.n_averaged), lambda n: setattr(average, "n_averaged", _Count(n))
    return Average(shards=average.module, has_buffers=True, count=count, set_count=set_count)


def _stochastic(replacements: Replacements, trainer: Trainer, average: Any, current: Current, write: Write) -> Average:
    (callback,) = callbacks(trainer, stock.StochasticWeightAveraging)
    if callback._device is not None:
        average.to(callback._device)
    loaded = 0

    def load_state_dict(load: Callable[..., None], state: dict[str, Any]) -> None:
        nonlocal loaded
        load(state)
        loaded = state["n_averaged"]
        # Lightning does so ahead of its own loading, which comes later here: a scheduler of another kind is to go on.
        if state["scheduler_state"] is not None:
            trainer.lr_scheduler_configs.clear()

    replacements.wrap(callback, "load_state_dict", load_state_dict)
    replacements.wrap(callback, "update_parameters", lambda update, to, _, n, fn: update(to, current(), n, fn))
    replacements.wrap(callback, "transfer_weights", lambda transfer, to, _: write(lambda into: transfer(to, into)))

    def count() -> int:
        return loaded if callback.n_averaged is None else int(callback.n_averaged)

    # The callback's own state has the number.
    return Average(shards=average, has_buffers=False, count=count, set_count=lambda n: None)
