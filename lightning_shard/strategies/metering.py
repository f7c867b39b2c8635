"""What a run's meters ask of its strategy: the tensors that this rank holds, on every engine alike."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import _lightning
from lightning_shard.engines.facts import EngineFacts
from lightning_shard.engines.resident import Held, gathered, module_tensors
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.memory_meter import StepMeter, account
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts
from lightning_shard.planning.optimizer_facts import optimizer_facts
from lightning_shard.planning.predict import predict_account
from lightning_shard.strategies.planned import PlannedRun, PlannedStrategy


class MeteredStrategy(PlannedStrategy):
    """Says what a rank holds; a subclass whose engine keeps more than the module and the optimizers says so."""

    engine: str
    aligned: bool
    _facts: ModelFacts | None = None

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

    def note_module(self) -> None:
        """Before sharding: keep what `predicted_account` is to start from."""
        module = self._metered()
        cut = any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in module.parameters())
        self._facts = None if cut else self.model_facts(module)

    def predicted_account(self) -> MemoryAccount | None:
        """What the fullest rank will hold of each kind in a step, without activations, by arithmetic; after set-up.

        None: without `note_module`, and where the module was cut before the run. Optimizer state is 0 where it can't be
        known before a step.
        """
        if self._facts is None:
            return None
        facts = [optimizer_facts(optimizer) for optimizer in self.optimizers]
        known = facts[0] if len(set(map(repr, facts))) == 1 else None
        return predict_account(
            self._facts,
            self._engine_facts(),
            self.policy,
            known or OptimizerFacts(slots=(), fixed_bytes=0),
            micro_batches=self._trainer.accumulate_grad_batches,
        )

    def _engine_facts(self) -> EngineFacts:
        """The engine of the run that was set up."""
        per_node = self.num_processes
        run = PlannedRun(ranks=self.world_size, per_node=per_node, device_type=self.root_device.type)
        return self.planned_engine(self._metered(), run)

    def _before_sharding(self, trainer: Trainer) -> None:
        """Let callbacks see the module of a fit while its parameters are whole, or on the meta device."""
        self._facts = None
        for callback in _lightning.callbacks(trainer):
            if (hook := getattr(callback, "before_sharding", None)) is not None:
                hook(trainer, self.lightning_module)

    def _metered(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module
