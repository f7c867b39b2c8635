"""Parameters, gradients and optimizer state of a run by FQN, full, on every engine."""

import torch
from torch import Tensor, nn

from lightning_shard.engines.engine import Engine
from lightning_shard.errors import ConfigurationError
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.full import gather_full, optimizer_slot, scatter_full
from lightning_shard.tensors.names import fqns


class FullTensors:
    """Gathers and scatters the tensors of a run. All ranks call each method."""

    def __init__(self, module: nn.Module, engine: Engine, checkpoints: Checkpoints, *, device: torch.device) -> None:
        """Look at the tensors of ``module`` under ``engine``; collectives run on ``device``."""
        self._module, self._engine, self._checkpoints = module, engine, checkpoints
        self._device = device

    def read(self, fqn: str, kind: str = "parameter") -> Tensor | None:
        """See `lightning_shard.full_tensor`."""
        live = self._live(fqn, kind)
        return None if live is None else gather_full(live, device=self._device)

    def write(self, fqn: str, value: Tensor, kind: str = "parameter") -> None:
        """See `lightning_shard.set_full_tensor`."""
        live = self._live(fqn, kind)
        if live is None:
            raise ConfigurationError(f"{fqn} has no {kind} now: look with full_tensor, which gives None then.")
        if tuple(live.shape) != tuple(value.shape):
            raise ConfigurationError(
                f"the new {kind} of {fqn} has shape {tuple(value.shape)}, but must have {tuple(live.shape)}: all ranks "
                "give the whole tensor."
            )
        scatter_full(value, live)
        if kind == "parameter":
            self._engine.publish()

    def _live(self, fqn: str, kind: str) -> LiveTensor | None:
        if kind == "parameter":
            self._checkpoints.synchronize()
        names, tensors = fqns(self._module), self._engine.tensors
        name = names.canonical(fqn)
        if kind == "parameter":
            return tensors.masters().get(name, names.tensors[name])
        if kind == "gradient":
            return tensors.gradient(name, names.tensors[name])
        self._engine.before_saving()
        return optimizer_slot(tensors.optimizers(), names.tensors[name], name, kind)
