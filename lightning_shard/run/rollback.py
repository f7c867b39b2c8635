"""Going back to a checkpoint in the middle of a fit, while the data goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard import _lightning
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES
from lightning_shard.errors import CheckpointError, DataError
from lightning_shard.ranks import Ranks
from lightning_shard.resume.rng import set_rng_state
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.data import RUN_STATE


class Rollback:
    """Puts the newest whole checkpoint of a fit back in place: one that it saved, or went on from."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        """``trainer``: in a fit, whose checkpoints ``checkpoints`` saves."""
        self._trainer = trainer
        self._checkpoints = checkpoints

    def run(self, why: str) -> None:
        """Restore weights, optimizers, schedulers, loss scale, generators and the count of steps. All ranks call it.

        Raises:
            DataError: on every rank, because there is no whole checkpoint.
        """
        trainer = self._trainer
        self._checkpoints.finish()
        path, checkpoint = self._open(why)
        self._checkpoints.load_tensors(optimizers=True, strict=True, begins=False)
        _lightning.restore_steps(trainer, checkpoint)
        states = checkpoint[RUN_STATE]["ranks"]
        if trainer.global_rank < len(states):
            set_rng_state(states[trainer.global_rank]["rng"])
        rank_zero_warn(f"{why} The fit went back to step {trainer.global_step}, {path}; the data goes on.")

    def _open(self, why: str) -> tuple[str, dict[str, Any]]:
        """The newest whole checkpoint, about to be loaded."""
        bad = self._trainer.global_step
        own = [*self._checkpoints.saved, *([self._trainer.ckpt_path] if self._trainer.ckpt_path else [])]
        for path in Ranks.of().broadcast([os.fspath(p) for p in own if Path(p).is_dir()]):
            try:
                checkpoint = self._checkpoints.load_checkpoint(path)
            except CheckpointError as error:
                rank_zero_warn(f"The fit can't go back to {path}: {error}")
                continue
            # Not one that was saved in the batch of the step that is left out.
            if OPTIMIZER_STATES in checkpoint and RUN_STATE in checkpoint and checkpoint["global_step"] < bad:
                return path, checkpoint
        raise DataError(
            f"{why} nonfinite is rollback, but this fit has no whole checkpoint yet to go back to. Save one earlier, "
            "such as with ModelCheckpoint(every_n_train_steps=...), or use nonfinite: skip."
        )
