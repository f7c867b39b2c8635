"""Everything that this package uses of Lightning's private names, in one place.

Tested with Lightning 2.6; a name that another version lacks fails here, on import, and not in a training step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized as is_initialized,
)
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import (
    _init_dist_connection as init_process_group,
)
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available as sync_reduce,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection as DDPForwardRedirection
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary, summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard._results import restore_training_results, training_results_state

__all__ = [
    "DDPForwardRedirection",
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "after_each_batch",
    "at_teardown",
    "begins_accumulation",
    "callbacks",
    "count_cut_parameters",
    "choose_checkpoint",
    "default_backend",
    "hold_schedulers",
    "init_process_group",
    "is_initialized",
    "is_missing_optimizer",
    "layer_sync",
    "leave_signals_alone",
    "let_checkpoints_wait",
    "let_children_end",
    "prepare_for_backward",
    "prediction_batches",
    "restore_training_results",
    "set_device",
    "set_device_mesh",
    "set_rank",
    "should_accumulate",
    "step_scheduler",
    "sync_reduce",
    "train_batch_size",
    "training_results_state",
    "use_no_grad_in_evaluation",
    "watches_zero_grad",
    "wrapped",
]


def set_device(module: LightningModule, device: torch.device) -> None:
    """Make ``device`` what ``LightningModule.device`` gives; the tensors are moved by the engines."""
    _update_properties(module, device=device)


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Make ``mesh`` what ``LightningModule.device_mesh`` gives in ``configure_model``."""
    module._device_mesh = mesh


def set_rank(rank: int) -> None:
    """Tell Lightning's ``rank_zero_*`` helpers which rank this process is."""
    for only in (rank_zero_only, fabric_rank_zero_only):
        vars(only)["rank"] = rank


def use_no_grad_in_evaluation(trainer: Trainer) -> None:
    """Run every evaluation loop under ``torch.no_grad`` instead of ``torch.inference_mode``.

    What FSDP2 gathers under inference mode are inference tensors, which the next training step can't update.
    """
    for loop in (
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    ):
        loop.inference_mode = False


def hold_schedulers(trainer: Trainer, when: Callable[[], bool]) -> None:
    """Leave schedulers of interval ``step`` where they are after a batch for which ``when`` says so.

    Lightning advances them after every batch that had an optimizer step, one that its own AMP skipped too.
    """
    loop = trainer.fit_loop.epoch_loop
    update = type(loop).update_lr_schedulers

    def update_unless_held(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not when():
            update(loop, interval, update_plateau_schedulers)

    # On the instance; a second fit replaces it.
    loop.update_lr_schedulers = update_unless_held  # type: ignore[method-assign]


def callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks, an attribute that its class does not declare."""
    return list(vars(trainer)["callbacks"])


def should_accumulate(trainer: Trainer) -> bool:
    """Whether this batch's gradients are only added up, with no optimizer step after it."""
    return trainer.fit_loop._should_accumulate()


def begins_accumulation(trainer: Trainer) -> bool:
    """Whether Lightning drops the gradients of the step before in this batch."""
    return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0


def watches_zero_grad(trainer: Trainer) -> bool:
    """Whether the module or a callback has a hook that Lightning calls where it drops gradients, or does so itself."""
    module = trainer.lightning_module
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks(trainer)
    )


def prediction_batches(trainer: Trainer) -> int:
    """How many batches this rank's prediction loop will run, over all loaders; 0 if that is not known."""
    batches = sum(trainer.predict_loop.max_batches)
    return 0 if batches == float("inf") else int(batches)


def count_cut_parameters(trainer: Trainer) -> None:
    """Let ``ModelSummary`` callbacks count parameters that ZeRO-3 has cut as whole ones, and show each rank's part.

    Lightning does so for its own DeepSpeed strategy alone.
    """

    def summary(depth: int, trainer: Trainer, module: LightningModule) -> Any:
        cut = any(hasattr(p, "ds_numel") for p in module.parameters())
        return (DeepSpeedSummary if cut else summarize)(module, max_depth=depth)

    for callback in callbacks(trainer):
        if isinstance(callback, ModelSummary):
            vars(callback)["_summary"] = partial(summary, callback._max_depth)


def is_missing_optimizer(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` stands for none, which Lightning puts where ``configure_optimizers`` returned None."""
    return isinstance(optimizer, _MockOptimizer)


def step_scheduler(scheduler: Any) -> LRSchedulerConfig:
    """A scheduler as Lightning steps it: after every optimizer step."""
    return LRSchedulerConfig(scheduler=scheduler, interval="step")


def wrapped(optimizers: list[Optimizer], strategy: Strategy) -> list[LightningOptimizer]:
    """The optimizers as users see them, with what was replaced on the instances.

    A wrapper is of a class derived from the optimizer's, and finds its attributes. Of DeepSpeed's optimizers on the
    host it would free the compiled state, by its number, when it is dropped (``DeepSpeedCPUAdam.__del__``): it gets
    no number.
    """
    wrappers = [LightningOptimizer._to_lightning_optimizer(optimizer, strategy) for optimizer in optimizers]
    for wrapper in wrappers:
        if "zero_grad" in vars(wrapper.optimizer):
            vars(wrapper)["zero_grad"] = wrapper.optimizer.zero_grad
        if any(name.startswith("ds_opt_") for name in vars(wrapper.optimizer)):
            vars(wrapper)["opt_id"] = -1
    return wrappers


def train_batch_size(trainer: Trainer) -> int | None:
    """Batch size of the training dataloader, if it was handed over as one; None where only a hook knows."""
    source = trainer.fit_loop._data_source.instance
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else None


def layer_sync(strategy: Any) -> Any:
    """The plugin that ``Trainer(sync_batchnorm=True)`` set, or None."""
    return strategy._layer_sync


def leave_signals_alone(trainer: Trainer) -> None:
    """Keep Lightning from installing its signal handlers in this run.

    They save, requeue and broadcast inside the handler, on whatever rank and in whatever line the signal comes. What
    they note is broadcast by rank 0 before every batch, and read: a wait for all ranks and for the device in every
    step, which goes with them.
    """
    # On the instance; the next run replaces it. Nothing was replaced, and so its own teardown has nothing to put back.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def at_teardown(trainer: Trainer, hook: Callable[[], None]) -> None:
    """Call ``hook`` at the end of this run, however it ends, after the strategy's teardown."""
    connector = trainer._signal_connector
    restore = type(connector).teardown

    def teardown() -> None:
        restore(connector)
        hook()

    # On the instance; the next run replaces it.
    connector.teardown = teardown  # type: ignore[method-assign]


def after_each_batch(trainer: Trainer, hook: Callable[[Any], None]) -> None:
    """Call ``hook(data_fetcher)`` when a training batch is counted and logged, ahead of a validation after it."""
    loop = trainer.fit_loop.epoch_loop
    end = type(loop).on_advance_end

    def on_advance_end(data_fetcher: Any) -> None:
        hook(data_fetcher)
        end(loop, data_fetcher)

    # On the instance; a second fit replaces it.
    loop.on_advance_end = on_advance_end  # type: ignore[method-assign]


def let_checkpoints_wait(
    trainer: Trainer, *, is_writing: Callable[[str], bool], link: Callable[[str, str], None]
) -> None:
    """Let ``ModelCheckpoint`` callbacks know of a checkpoint that is written in the background.

    Args:
        trainer: in a fit.
        is_writing: whether the checkpoint at a path is still being written: its name is taken, as if it were there.
        link: makes the second path a link to the first (``save_last="link"``) once that is whole; all ranks call it.
    """

    def follow(callback: ModelCheckpoint) -> None:
        kind = type(callback)

        def file_exists(filepath: Any, trainer: Trainer) -> bool:
            exists = kind.file_exists(callback, filepath, trainer)  # a collective
            return exists or is_writing(os.fspath(filepath))

        def link_when_whole(trainer: Trainer, filepath: str, linkpath: str) -> None:
            if is_writing(filepath):
                link(filepath, linkpath)
            else:
                kind._link_checkpoint(trainer, filepath, linkpath)

        # On the instance; a second fit replaces it.
        callback.file_exists = file_exists  # type: ignore[method-assign]
        callback._link_checkpoint = link_when_whole  # type: ignore[method-assign]

    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            follow(callback)


def choose_checkpoint(trainer: Trainer, choose: Callable[[Any], Any]) -> None:
    """Resume from ``choose(ckpt_path)``, None for nothing, where Lightning would resume from ``ckpt_path``."""
    connector = trainer._checkpoint_connector
    start = type(connector).resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        start(connector, choose(checkpoint_path), weights_only=weights_only)

    # On the instance; a second run replaces it.
    connector.resume_start = resume_start  # type: ignore[method-assign]


def let_children_end(strategy: Any) -> None:
    """Keep Lightning's launcher from killing this process when the processes that it started end with an exit code."""
    processes = getattr(strategy.launcher, "procs", None)
    if isinstance(processes, list):
        processes.clear()
