"""The live tensors of a run whose optimizer steps flat partitions: stages 1 to 3 in a fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.resident import Resident
from lightning_shard.engines.zero import gradients, resident
from lightning_shard.engines.zero.running import Running
from lightning_shard.engines.zero.values import Values
from lightning_shard.tensors.flat import AnyOptimizer, FlatOptimizer, LiveTensor


class FlatTensors:
    """See `lightning_shard.engines.engine.EngineTensors`."""

    def __init__(
        self, module: nn.Module, running: Running, values: Values, parameters: Sequence[Tensor], *, device: torch.device
    ) -> None:
        """Look at the tensors of a run.

        Args:
            module: the LightningModule.
            running: DeepSpeed's engine, with flat groups.
            values: of the module's parameters.
            parameters: the module's; reading them off it in forward would gather them.
            device: where this rank computes.
        """
        self._module = module
        self._running = running
        self._values = values
        self._parameters = parameters
        self._device = device

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer around the user's."""
        return self._running.zero

    @property
    def shares(self) -> Sequence[Tensor]:
        """This rank's shares, on the host, of loaded values that DeepSpeed rounded and nothing steps."""
        return self._values.shares

    def masters(self) -> Mapping[str, LiveTensor]:
        return self._values.tensors(self._running)

    def optimizers(self) -> Sequence[AnyOptimizer]:
        assert self._running.optimizer is not None
        return [FlatOptimizer(optimizer=self._running.optimizer, groups=self._running.groups)]

    def stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        return [(m.fqn, group.flat) for group in self._running.groups for m in group.members if m.stepped]

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        if not self._running.pending:
            return None
        return gradients.of_parameter(self._running.zero, self._running.groups, fqn)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return gradients.reduced(self._running.zero) if self._running.pending else []

    def unreduced_gradients(self) -> Iterable[tuple[str, Tensor]]:
        names: dict[Tensor, str] = {p: n for n, p in self._module.named_parameters() if p.requires_grad}
        return gradients.held(self._running.zero, names)

    def resident(self) -> Iterable[Resident]:
        return resident.zero_tensors(
            self._running.zero,
            self._module,
            device=self._device,
            parameters=self._parameters,
            kept=self._values.shares,
        )

    def unsharded(self) -> Iterable[Resident]:
        return resident.unsharded(self._parameters)
