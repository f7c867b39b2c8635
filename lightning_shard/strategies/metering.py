"""What a run's meters ask of its strategy: the tensors that this rank holds, on every engine alike."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Trainer
from torch import nn

from lightning_shard import _lightning
from lightning_shard.engines.holdings import Held, gathered, module_tensors
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.advice import Sharding
from lightning_shard.meters.live import StepMeter, account
from lightning_shard.strategies.watching import WatchedStrategy


class MeteredStrategy(WatchedStrategy):
    """Says what a rank holds; a subclass whose engine keeps more than the module and the optimizers says so."""

    engine: str
    aligned: bool

    def held_tensors(self) -> Iterable[Held]:
        """All live tensors of the run on this rank but activations, by kind and place. No communication."""
        module = self._metered()
        return module_tensors(module, self.optimizers, device=self.root_device, wrapped=self.model)

    def gathered_tensors(self) -> Iterable[Held]:
        """Of these the parameters that are whole for the moment. No communication."""
        return gathered(self._metered(), device=self.root_device)

    def memory_account(self) -> MemoryAccount:
        """The bytes that this rank holds now, without activations. No communication."""
        return account(self.held_tensors())

    def step_meter(self) -> StepMeter:
        """A meter for one optimizer step of this rank."""
        return StepMeter(self._metered(), self.held_tensors, self.gathered_tensors, device=self.root_device)

    def sharding(self) -> Sharding:
        """How the run holds its states."""
        return Sharding(engine=self.engine, ranks=self.world_size, pieces=1, cut=frozenset(), aligned=self.aligned)

    def _before_sharding(self, trainer: Trainer) -> None:
        """Let callbacks see the module of a fit while its parameters are whole, or on the meta device."""
        for callback in _lightning.callbacks(trainer):
            if (hook := getattr(callback, "before_sharding", None)) is not None:
                hook(trainer, self.lightning_module)

    def _metered(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module
