"""Recomputed activations and compiled units, on every engine."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.engines import compiling
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.memory_advice import advice
from lightning_shard.strategies.running import RunningStrategy


class TransformingStrategy(RunningStrategy):
    """Keeps what the user set about the units' forward, and tells what the compiler made of it."""

    activation_checkpointing: Checkpointing = None
    """What runs again in backward."""

    compile = False
    """Whether units are compiled."""

    _compiled: compiling.Compiled | None = None
    """What was compiled before the first step, until that is over."""

    def memory_advice(self, account: MemoryAccount) -> str:
        """What would need less of a device than ``account``, in lines to read. No communication."""
        checkpointing = self.activation_checkpointing is not None
        return advice(account, self._engine_facts(), aligned=self.aligned, checkpointing=checkpointing)

    def on_train_start(self) -> None:
        """Look at the compiler before the first step; see also the parent's."""
        super().on_train_start()
        self._compiled = compiling.compiled_so_far() if self.compile else None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See the parent's; the first one compiles, where that was asked for."""
        result = super().training_step(*args, **kwargs)
        if self._compiled is not None:
            before, self._compiled = self._compiled, None
            if (complaint := compiling.complaint(before, compiling.compiled_so_far())) is not None:
                rank_zero_warn(complaint)
        return result
