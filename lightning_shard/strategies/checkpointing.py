"""Resuming a run from a checkpoint directory, whatever engine wrote it, and from what others wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard import _lightning
from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.collect import OPTIMIZER_STATES
from lightning_shard.checkpoint.forms import is_stock, open_any
from lightning_shard.checkpoint.lightning_file import ModuleNames
from lightning_shard.checkpoint.load import load_training_state, open_checkpoint
from lightning_shard.checkpoint.stored import write_portable
from lightning_shard.ranks import Ranks
from lightning_shard.strategies import run_state
from lightning_shard.strategies.saving import RUN_STATE, SavingStrategy


class CheckpointingStrategy(SavingStrategy):
    """Loads checkpoints, besides saving them."""

    _loading: Path | None = None
    _converted: Path | None = None
    _resumed: dict[str, Any] | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: values are read into the parameters that the engine left."""
        return True

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``trainer.pt``; the tensors follow in `load_model_state_dict`. All ranks call it.

        What stock Lightning or DeepSpeed wrote, and a file in the ``full`` form, is first converted into a directory
        below ``default_root_dir``, which is removed after loading. ``weights_only`` is not looked at: nothing in a
        checkpoint is ever unpickled freely.

        Raises:
            CheckpointError: on every rank alike.
        """
        if Ranks.of().first(f"opening {checkpoint_path}", lambda: is_stock(checkpoint_path)):
            checkpoint_path = self._convert(checkpoint_path)
        _, state = open_checkpoint(checkpoint_path)
        self._loading = Path(checkpoint_path)
        if RUN_STATE in state:
            run_state.place_loaders(state, state[RUN_STATE], self.global_rank)
        return {**state, "state_dict": {}}

    def _convert(self, path: str | os.PathLike[str]) -> Path:
        """Write what another library saved at ``path`` as a directory of our own; returns where. All ranks call it."""
        assert self.lightning_module is not None
        root = Path(self.lightning_module.trainer.default_root_dir).absolute()
        target = Path(self.broadcast(str(root / f".converted-{commit.new_token()}.ckpt")))
        rank_zero_info(f"Converting {path} into {target}, which is removed after loading.")
        optimizers: Literal["named", "none"] = "named" if self.optimizers else "none"
        stored = Ranks.of().agree(f"opening {path}", lambda: open_any(path, self._module_names, optimizers=optimizers))
        self._converted = target
        write_portable(target, stored)
        return target

    def _module_names(self) -> ModuleNames:
        """The names that a stock file lacks, from the live module and optimizers."""
        assert self.lightning_module is not None
        return ModuleNames.of(self.lightning_module, self._optimizer_states())

    def _remove_converted(self) -> None:
        converted, self._converted = self._converted, None
        if converted is not None:
            self.remove_checkpoint(converted)

    def on_exception(self, exception: BaseException) -> None:
        """Leave no converted checkpoint behind."""
        self._remove_converted()
        super().on_exception(exception)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the tensors into the live parameters, buffers and, in a fit, optimizer slots. All ranks call it.

        Raises:
            CheckpointError: on every rank alike, before anything was changed.
        """
        assert self.lightning_module is not None
        assert self._loading is not None
        self._before_reading_parameters()
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        resuming = fitting and OPTIMIZER_STATES in checkpoint
        try:
            load_training_state(
                self._loading,
                module=self.lightning_module,
                optimizers=self._optimizer_states() if resuming else [],
                masters=self._model_tensors(),
                strict=strict,
            )
        finally:
            self._loading = None
            self._remove_converted()
        self._after_reading_tensors()
        if resuming and RUN_STATE in checkpoint:
            self._resumed = checkpoint[RUN_STATE]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing left to do but for the loops, which were loaded before: the slots were read with the parameters."""
        assert self.lightning_module is not None
        if self._resumed is not None and self._resumed.get("epoch_ends"):
            _lightning.end_epoch(self._replacements, self.lightning_module.trainer)

    def on_train_start(self) -> None:
        """Go on with the generators and metrics of a resumed run, after all that draws from or resets them."""
        super().on_train_start()
        assert self.lightning_module is not None
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            run_state.restore(self._replacements, self.lightning_module.trainer, resumed)

    def _after_reading_tensors(self) -> None:
        """Take over in the module what was read into `_model_tensors`."""
