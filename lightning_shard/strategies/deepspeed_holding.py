"""What a rank holds under DeepSpeed: masters, gradients and state for meters, and the tensors of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_shard.engines.facts import EngineFacts, deepspeed_facts
from lightning_shard.engines.resident import Held
from lightning_shard.engines.zero import cpu_adam, resident
from lightning_shard.engines.zero.config import DeepSpeedFields, RunFacts, deepspeed_config
from lightning_shard.engines.zero.running import ZeroEngine
from lightning_shard.engines.zero.values import Values
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.deepspeed_facts import hidden_size
from lightning_shard.strategies.planned import PlannedRun
from lightning_shard.tensors.flat import AnyOptimizer, FlatOptimizer, LiveTensor


class HoldingStrategy(ShardStrategy):
    """Reads what DeepSpeed's engine keeps beside the module; a subclass starts the engine."""

    _fields: DeepSpeedFields
    _stage: int
    _config: dict[str, Any]
    """What DeepSpeed was given; empty before a run."""

    _running: ZeroEngine | None = None
    """From the beginning of a fit, or of an evaluation in stage 3; after the run too, stopped."""

    _values: Values | None = None
    _listed: list[Tensor]
    """The module's parameters; reading them off it in forward would gather them."""

    # Meters

    def held_tensors(self) -> Iterable[Held]:
        """See the parent's; with masters, buckets and staging buffers, and tensors in files."""
        if self._running is None or self._values is None or not self._running.groups:
            return super().held_tensors()
        kept = self._values.shares
        return resident.zero_tensors(
            self._running.zero, self._metered(), device=self.root_device, parameters=self._listed, kept=kept
        )

    def gathered_tensors(self) -> Iterable[Held]:
        """See the parent's."""
        return resident.gathered(self._listed)

    def planned_engine(self, module: nn.Module, run: PlannedRun) -> EngineFacts:
        """See the parent's; "auto" values are those of such a run."""
        facts = RunFacts(
            world_size=run.ranks,
            device_type=run.device_type,
            policy=self.policy,
            aligned=self.aligned,
            accumulate_grad_batches=run.accumulate_grad_batches,
            optimizer=run.optimizer,
            hidden_size=hidden_size(module),
            number_of_parameters=sum(p.numel() for p in module.parameters()),
        )
        config = deepspeed_config(self._fields, facts)
        return deepspeed_facts(config, ranks=run.ranks, accumulate=self.policy.accumulate, device_type=run.device_type)

    def _engine_facts(self) -> EngineFacts:
        return deepspeed_facts(self._config, ranks=self.world_size, accumulate=self.policy.accumulate)

    # Checkpoints

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The whole configuration that DeepSpeed was given, "auto" resolved; empty before a run. It is saved too."""
        return self._config

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save DeepSpeed's configuration, for people to read, with what the parent's saves."""
        super().save_checkpoint({**checkpoint, "deepspeed_config": self._config}, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """FQN, tied ones too, to this rank's live tensor: masters where there are any, whole or a flat piece."""
        own = super().lightning_module_state_dict()
        return {**own, **self._model_tensors()}

    def _optimizer_states(self) -> Sequence[AnyOptimizer]:
        if self._running is None or self._stage == 0:
            return super()._optimizer_states()
        return [FlatOptimizer(optimizer=self.optimizers[0], groups=self._running.groups)]

    def _model_tensors(self) -> Mapping[str, LiveTensor]:
        return {} if self._values is None else self._values.tensors(self._running)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the tensors, and let the optimizer go on from the step that they are of; see the parent's."""
        super().load_model_state_dict(checkpoint, strict)
        if self._running is not None and self._running.optimizer is not None:
            cpu_adam.replay(self._running.optimizer, self._running.groups)

    def _after_reading_tensors(self) -> None:
        assert self._values is not None
        self._values.show(self._running, device=self.root_device)
