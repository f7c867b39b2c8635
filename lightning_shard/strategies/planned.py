"""A strategy's settings as the plain facts that bytes, traffic and time are computed from, before a run and in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_shard.engines.facts import EngineFacts
from lightning_shard.engines.fsdp import ignored_parameters
from lightning_shard.engines.units import Unit, find_units
from lightning_shard.planning.facts import ModelFacts, model_facts
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.strategies.watching import WatchedStrategy


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a plan assumes of a run."""

    ranks: int
    """Processes."""

    per_node: int
    """Processes of a node."""

    device_type: str = "cuda"
    accumulate_grad_batches: int = 1
    optimizer: Mapping[str, Any] | None = None
    """``type`` and hyperparameters, for DeepSpeed's "auto" values."""


class PlannedStrategy(WatchedStrategy):
    """Says what a run under it would hold and send; nothing is started for it. A subclass says what its engine does."""

    @property
    @abstractmethod
    def policy(self) -> PrecisionPolicy:
        """The dtypes of this run."""

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """Processes of this node."""

    @abstractmethod
    def planned_engine(self, module: nn.Module, run: PlannedRun) -> EngineFacts:
        """The engine on the processes of ``run``.

        Args:
            module: whole, real or without data; its frozen parameters and sizes decide a few things.
            run: what is assumed of it.

        Raises:
            ConfigurationError: settings that do not fit the number of processes, or each other.
        """

    def check_precision(self) -> None:
        """Refuse a precision that the engine does not run, as a run does before it begins.

        Raises:
            PrecisionError: with what to use.
        """
        _ = self.policy

    def find_units(self, module: nn.Module) -> list[Unit]:
        """The units that are gathered, checkpointed and compiled, of a module whose parameters are whole."""
        return find_units(module, "auto", with_children=False)

    def model_facts(self, module: nn.Module, *, groups: Any = ()) -> ModelFacts:
        """The facts of a module under this strategy; its parameters are whole, real or without data.

        Args:
            module: the LightningModule.
            groups: the optimizer's parameter groups.
        """
        _, whole = ignored_parameters(module, self._ignored_modules())
        return model_facts(module, units=self.find_units(module), unsharded=whole(), groups=groups)

    def _ignored_modules(self) -> tuple[str, ...]:
        """Class names of modules that are not cut."""
        return ()
