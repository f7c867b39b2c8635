"""What a run does in place of Lightning: choose what it resumes from, take signals, let errors through."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_shard._lightning import Replacements, callbacks, loaders, loops, results
from lightning_shard._lightning.optimizers import full_gradient_norms
from lightning_shard.checkpoint.load import OpenCheckpoint
from lightning_shard.engines.engine import Engine
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.run.averaging import Averaging
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.fit import checkpoint_folders
from lightning_shard.run.full_tensors import FullTensors
from lightning_shard.run.memory import Memory
from lightning_shard.run.nonfinite import roll_back
from lightning_shard.run.preemption import Preemption, RunIdentity


def take_over(
    replacements: Replacements,
    trainer: Trainer,
    identity: RunIdentity,
    checkpoints: Checkpoints,
    preemption: Preemption,
) -> None:
    """Keep the order of data that the loaders say, and choose checkpoints and take signals in Lightning's place."""
    loaders.keep_order(replacements, trainer)
    callbacks.leave_out_copies(replacements, trainer)
    fitting = trainer.state.fn == TrainerFn.FITTING

    def choose(asked: Any) -> Any:
        chosen = identity.choose_checkpoint(asked, fitting=fitting, folders=checkpoint_folders(trainer))
        checkpoints.opened = chosen if isinstance(chosen, OpenCheckpoint) else None
        return str(chosen.path) if isinstance(chosen, OpenCheckpoint) else chosen

    callbacks.choose_checkpoint(replacements, trainer, choose)
    if preemption.signals:
        loops.leave_signals_alone(replacements, trainer)
        if fitting:
            preemption.take_over_signals()  # which end the process elsewhere


def after_batches(
    replacements: Replacements,
    trainer: Trainer,
    checkpoints: Checkpoints,
    preemption: Preemption,
    go_back: Callable[[Callable[[str], None], Any], None],
) -> None:
    """After each batch ``go_back`` to a checkpoint where one is due, and then stop, which saves, where that is."""
    restore, stop = partial(roll_back, trainer, checkpoints), partial(preemption.after_batch, trainer)
    loops.after_each_batch(replacements, trainer, partial(go_back, restore), stop)


def keep_batch(trainer: Trainer, identity: RunIdentity) -> None:
    """Change ``accumulate_grad_batches`` to keep the newest checkpoint's micro-batches in a step. All ranks call it."""
    folders = checkpoint_folders(trainer)
    before = Ranks.of().first("reading the batches of a step", lambda: identity.micro_batches(folders))
    keeps, rest = divmod(before or 0, trainer.world_size)
    if keeps and not rest and keeps != trainer.accumulate_grad_batches:
        rank_zero_info(
            f"A step of run {identity.name} has {before} micro-batches, and so on {trainer.world_size} ranks "
            f"accumulate_grad_batches is {keeps}, and not {trainer.accumulate_grad_batches}."
        )
        trainer.accumulate_grad_batches = keeps


def settle_fit(
    replacements: Replacements, trainer: Trainer, engine: Engine, checkpoints: Checkpoints, async_save: bool | str
) -> None:
    """In a fit let errors through, count and log sharded tensors in full, validate at one time, save after a step. With
    ``async_save``, the strategy's, callbacks know of checkpoints in the background; "continuous": one at a time.
    """
    module = trainer.lightning_module
    tensors = FullTensors(module, engine, checkpoints, device=trainer.strategy.root_device)
    full_gradient_norms(replacements, module, partial(tensors.read, kind="gradient"))
    callbacks.count_sharded_parameters(replacements, trainer)
    callbacks.let_errors_through(replacements, trainer)
    if not engine.follows_freezing:
        callbacks.leave_flat_groups_unnamed(replacements, trainer)
    if async_save:
        saver = checkpoints.saver
        callbacks.let_checkpoints_wait(replacements, trainer, is_writing=saver.is_writing, link=saver.link)
    callbacks.save_between_steps(
        replacements, trainer, lambda: async_save == "continuous" and checkpoints.saver.is_busy
    )
    results.log_full_values(replacements, module)
    loops.validate_by_one_clock(replacements, trainer, trainer.strategy.broadcast)


def begin_averaging(
    replacements: Replacements, trainer: Trainer, engine: Engine, checkpoints: Checkpoints, memory: Memory | None
) -> None:
    """Let a callback that averages weights, if there is one, average what ``engine`` has engaged. All ranks call it;
    ConfigurationError: that lies in files.
    """
    if callbacks.averaging_callbacks(trainer):
        if any(held.kind == "masters" and held.memory == "nvme" for held in engine.tensors.resident()):
            raise ConfigurationError(
                f"{type(callbacks.averaging_callbacks(trainer)[0]).__name__} averages what is stepped in every step, "
                "but with the optimizer offloaded to NVMe that lies in files. Use offload_optimizer with device: cpu."
            )
        assert memory is not None, "it is made before the engine engages"
        averaging = Averaging(trainer.lightning_module, engine, device=trainer.strategy.root_device)
        averaging.begin(replacements, trainer)
        checkpoints.averaging = memory.averaging = averaging


def keeps_optimizers(engine: Engine, module: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a run that is no fit leaves a fit's optimizers, for saves: they step the module's parameters."""
    present = {id(parameter) for parameter in module.parameters()}
    stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if engine.steps_itself or not all(id(parameter) in present for parameter in stepped):
        return False
    engine.engage(optimizers)
    return True
