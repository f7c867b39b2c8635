"""What a run does in place of Lightning: choose what it resumes from, and take signals."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard import _lightning
from lightning_shard.checkpoint.load import OpenCheckpoint
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.fit import checkpoint_folders
from lightning_shard.run.identity import RunIdentity
from lightning_shard.run.preemption import Preemption


def take_over_resuming(
    replacements: _lightning.Replacements, trainer: Trainer, identity: RunIdentity, checkpoints: Checkpoints
) -> None:
    """Have ``identity`` choose what a run goes on from, in place of Lightning; ``checkpoints`` loads what it opened."""
    fitting = trainer.state.fn == TrainerFn.FITTING

    def choose(asked: Any) -> Any:
        chosen = identity.choose_checkpoint(asked, fitting=fitting, folders=checkpoint_folders(trainer))
        checkpoints.opened = chosen if isinstance(chosen, OpenCheckpoint) else None
        return str(chosen.path) if isinstance(chosen, OpenCheckpoint) else chosen

    _lightning.choose_checkpoint(replacements, trainer, choose)


def take_over_signals(replacements: _lightning.Replacements, trainer: Trainer, preemption: Preemption) -> None:
    """Keep Lightning's handlers out, and in a fit note the signals; they end the process elsewhere."""
    if preemption.signals:
        _lightning.leave_signals_alone(replacements, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            preemption.take_over_signals()
