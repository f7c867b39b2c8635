"""Saving a run in the portable checkpoint directory, the same from every engine, and in the background if asked to."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_shard import _lightning
from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.collect import OPTIMIZER_STATES, CheckpointInfo, State, training_state
from lightning_shard.errors import CheckpointError
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.strategies import run_state
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import fqns

RUN_STATE = "lightning_shard"
"""Where ``trainer.pt`` keeps what Lightning's checkpoint has no place for: the generators of every rank, ..."""


class SavingStrategy(ParallelStrategy):
    """Saves checkpoint directories; a subclass says what the engine is called."""

    engine: str
    """What the manifest calls the engine."""

    async_save: bool
    """Whether training goes on while a checkpoint is written."""

    _replacements: _lightning.Replacements
    _saver: Saver | None = None
    _is_training = False
    _rewound: Mapping[str, Any] | None = None
    """Parts of the run's state as they were before, where a save is to go back behind something that has begun."""

    @property
    @abstractmethod
    def policy(self) -> PrecisionPolicy:
        """The dtypes of this run."""

    @property
    def saver(self) -> Saver:
        """What saves the checkpoints of this strategy's runs."""
        if self._saver is None:
            self._saver = Saver()
        return self._saver

    # Save

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """FQN, tied ones too, to this rank's live tensor: whole, or a DTensor of which it has a part.

        What ``on_save_checkpoint`` takes out of it is left out of the checkpoint.
        """
        assert self.lightning_module is not None
        names = fqns(self.lightning_module)
        return {**names.tensors, **{alias: names.tensors[fqn] for alias, fqn in names.aliases.items()}}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing yet: `save_checkpoint` writes the optimizers' state in place, by FQN."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint directory ``filepath``, whole or not at all. All ranks call it.

        A path that ends in ``.full.ckpt`` becomes one stock Lightning file instead. While training goes on, and with
        ``async_save``, it returns when the tensors may change: see `finish_saving`.

        Args:
            checkpoint: what Lightning dumped; rank 0's counts, but for this rank's generators.
            filepath: rank 0's counts.
            storage_options: not supported, since no ``CheckpointIO`` is involved.

        Raises:
            CheckpointError: on every rank alike, naming the rank that failed; an older checkpoint at the path stays.
                Also for a save before that failed in the background.
        """
        if storage_options is not None:
            raise CheckpointError(
                f"storage_options is {storage_options!r}, but {type(self).__name__} writes directories itself and has "
                "no CheckpointIO to pass it to. Remove it."
            )
        assert self.lightning_module is not None
        target = str(self.broadcast(os.fspath(filepath)))
        self._before_reading_parameters()
        checkpoint = dict(checkpoint)
        leave_out = self._left_out(checkpoint.pop("state_dict"))
        with_optimizers = OPTIMIZER_STATES in checkpoint
        if with_optimizers:
            trainer = self.lightning_module.trainer
            loops, epoch_ends = _lightning.saved_after_batch(trainer, checkpoint["loops"])
            checkpoint["loops"] = loops
            checkpoint[RUN_STATE] = run_state.collect(trainer, loops, self._rewound or {}, epoch_ends=epoch_ends)

        def collect() -> State:
            assert self.lightning_module is not None
            return training_state(
                module=self.lightning_module,
                optimizers=self._optimizer_states() if with_optimizers else [],
                masters=self._model_tensors(),
                trainer_state=checkpoint,
                info=CheckpointInfo(
                    engine=self.engine,
                    policy=self.policy.text(),
                    ledger=self._measured(),
                    run=self._run_facts() if with_optimizers else {},
                ),
                leave_out=leave_out,
                equal_buffers=True,
            )

        self.saver.save(target, collect, background=self._saves_in_background())

    def _saves_in_background(self) -> bool:
        """Whether there will be a step, or the end of training, at which the outcome is looked at."""
        if not self.async_save or not self._is_training:
            return False
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.status == TrainerStatus.RUNNING

    def _run_facts(self) -> dict[str, Any]:
        """Name of the run, step and time; empty: the checkpoint is never taken for that of a run."""
        return {}

    def _measured(self) -> dict[str, Any]:
        """The ledger in plain JSON values; empty where nothing was measured."""
        return {}

    def _left_out(self, kept: Mapping[str, Any]) -> set[str]:
        """Names of the module that are not in ``kept`` any more, on every rank what rank 0 says."""
        assert self.lightning_module is not None
        names = fqns(self.lightning_module).tensors
        if added := sorted(set(kept) - set(self.lightning_module_state_dict())):
            raise CheckpointError(
                f"on_save_checkpoint added {', '.join(added[:5])} to the state_dict, but a checkpoint has the module's "
                "own tensors there. Put it under a key of its own: checkpoint['my_key'] = ..."
            )
        return set(self.broadcast(sorted(set(names) - set(kept))))

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint directory. All ranks may call it; rank 0 acts.

        While another checkpoint is being written, that waits until it is whole; if it fails, nothing is deleted.
        """
        if self.is_global_zero:
            self.saver.remove(filepath)

    def _link_checkpoint(self, filepath: str, name: str) -> None:
        if self.is_global_zero:
            self.saver.link(filepath, name)

    # In the background

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written in the background is whole. All ranks call it.

        Raises:
            CheckpointError: writing it failed; on every rank alike.
        """
        if self._saver is not None:
            self._saver.finish()

    def on_train_start(self) -> None:
        """From here on saves may go on in the background. All ranks call it."""
        super().on_train_start()
        assert self.lightning_module is not None
        self._is_training = True
        if self.async_save:
            _lightning.let_checkpoints_wait(
                self._replacements,
                self.lightning_module.trainer,
                is_writing=self.saver.is_writing,
                link=self._link_checkpoint,
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """See how the save in the background stands. All ranks call it.

        Raises:
            CheckpointError: it failed; on every rank alike and at the same batch.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._saver is not None:
            self._saver.look()

    def on_train_end(self) -> None:
        """Have everything saved; see `finish_saving`. All ranks call it."""
        super().on_train_end()
        self._is_training = False
        self.finish_saving()

    def _end_saving(self) -> None:
        """Let the save in the background come to its end, in whatever state the run is: no rank communicates here."""
        self._is_training = False
        if self._saver is not None and (failure := self._saver.close()) is not None:
            rank_zero_warn(f"A checkpoint could not be saved in the background: {failure}")

    # What differs between engines

    def _before_reading_parameters(self) -> None:
        """Put the parameters that the optimizer steps in place, and rank 0's buffers on every rank."""

    def _optimizer_states(self) -> Sequence[AnyOptimizer]:
        """The optimizers as checkpoints see them: torch's own over the module's parameters, or over flat tensors."""
        return self.optimizers

    def _model_tensors(self) -> Mapping[str, LiveTensor]:
        """FQN to live tensor, of those that are saved and read in the place of the module's own."""
        return {}
