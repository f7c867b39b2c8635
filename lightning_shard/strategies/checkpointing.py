"""Saving and resuming a run in the portable checkpoint directory, the same from every engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.flat_shard import FlatTensor
from lightning_shard.checkpoint.forms import is_stock, open_any
from lightning_shard.checkpoint.full import names_full, write_full
from lightning_shard.checkpoint.lightning_file import ModuleNames
from lightning_shard.checkpoint.load import load_training_state, open_checkpoint
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.save import OPTIMIZER_STATES, CheckpointInfo, save_training_state
from lightning_shard.checkpoint.state import fqns
from lightning_shard.checkpoint.stepped import AnyOptimizer
from lightning_shard.checkpoint.stored import open_portable, write_portable
from lightning_shard.errors import CheckpointError
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.strategies import run_state

RUN_STATE = "lightning_shard"
"""Where ``trainer.pt`` keeps what Lightning's checkpoint has no place for: the generators of every rank, ..."""


class CheckpointingStrategy(ParallelStrategy):
    """Saves and loads checkpoint directories; a subclass says what the engine is called."""

    engine: str
    """What the manifest calls the engine."""

    _loading: Path | None = None
    _converted: Path | None = None
    _resumed: dict[str, Any] | None = None
    _rewound: Mapping[str, Any] | None = None
    """Parts of the run's state as they were before, where a save is to go back behind something that has begun."""

    @property
    def policy(self) -> PrecisionPolicy:
        """The dtypes of this run."""
        raise NotImplementedError

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: values are read into the parameters that the engine left."""
        return True

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

        A path that ends in ``.full.ckpt`` becomes one stock Lightning file instead: rank 0 writes it from a directory
        beside it, which is removed then, so that no rank ever holds more than one whole tensor.

        Args:
            checkpoint: what Lightning dumped; rank 0's counts, but for this rank's generators.
            filepath: rank 0's counts.
            storage_options: not supported, since no ``CheckpointIO`` is involved.

        Raises:
            CheckpointError: on every rank alike, naming the rank that failed; an older checkpoint at the path stays.
        """
        if storage_options is not None:
            raise CheckpointError(
                f"storage_options is {storage_options!r}, but {type(self).__name__} writes directories itself and has "
                "no CheckpointIO to pass it to. Remove it."
            )
        target = str(self.broadcast(os.fspath(filepath)))
        if not names_full(target):
            self._save_portable(checkpoint, target)
            return

        def begin() -> str:
            commit.check_replaceable(Path(target))
            return str(commit.temporary_sibling(Path(target), commit.new_token()))

        parts = Ranks.of().first(f"starting to save {target}", begin)
        self._save_portable(checkpoint, parts)
        try:
            Ranks.of().first(f"writing {target}", lambda: write_full(target, open_portable(parts)))
        finally:
            self.remove_checkpoint(parts)

    def _save_portable(self, checkpoint: Mapping[str, Any], path: str) -> None:
        assert self.lightning_module is not None
        self._before_reading_parameters()
        checkpoint = dict(checkpoint)
        leave_out = self._left_out(checkpoint.pop("state_dict"))
        with_optimizers = OPTIMIZER_STATES in checkpoint
        if with_optimizers:
            checkpoint[RUN_STATE] = run_state.collect(
                self.lightning_module.trainer, checkpoint["loops"], self._rewound or {}
            )
        save_training_state(
            path,
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
        )

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
        """Delete a checkpoint directory. All ranks may call it; rank 0 acts."""
        if self.is_global_zero:
            commit.remove(filepath)

    # Load

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
        """Nothing left to do: the slots were read together with the parameters."""

    def on_train_start(self) -> None:
        """Go on with the generators and metrics of a resumed run, after all that draws from or resets them."""
        super().on_train_start()
        assert self.lightning_module is not None
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            run_state.restore(self.lightning_module.trainer, resumed)

    # What differs between engines

    def _before_reading_parameters(self) -> None:
        """Put the parameters that the optimizer steps in place, and rank 0's buffers on every rank."""

    def _optimizer_states(self) -> Sequence[AnyOptimizer]:
        """The optimizers as checkpoints see them: torch's own over the module's parameters, or over flat tensors."""
        return self.optimizers

    def _model_tensors(self) -> Mapping[str, Tensor | FlatTensor]:
        """FQN to live tensor, of those that are saved and read in the place of the module's own."""
        return {}

    def _after_reading_tensors(self) -> None:
        """Take over in the module what was read into `_model_tensors`."""
