"""Parameters, gradients and optimizer state of a run by name, whole, whatever the engine cuts."""

from __future__ import annotations

from torch import Tensor

from lightning_shard.errors import ConfigurationError
from lightning_shard.strategies.connecting import ConnectedStrategy
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.full import gather_full, optimizer_slot, scatter_full
from lightning_shard.tensors.names import fqns


class WholeTensorsStrategy(ConnectedStrategy):
    """Gathers and scatters tensors by name; a subclass of another engine says where its gradients are."""

    def full_tensor(self, fqn: str, kind: str = "parameter") -> Tensor | None:
        """See `lightning_shard.full_tensor`."""
        live = self._live(fqn, kind)
        return None if live is None else gather_full(live, device=self.root_device)

    def set_full_tensor(self, fqn: str, value: Tensor, kind: str = "parameter") -> None:
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
            self._after_reading_tensors()

    def _live(self, fqn: str, kind: str) -> LiveTensor | None:
        assert self.lightning_module is not None
        if kind == "parameter":
            self._before_reading_parameters()
        names = fqns(self.lightning_module)
        name = names.canonical(fqn)
        if kind == "parameter":
            return self._model_tensors().get(name, names.tensors[name])
        if kind == "gradient":
            return self._live_gradient(name, names.tensors[name])
        return optimizer_slot(self._optimizer_states(), names.tensors[name], name, kind)

    def _live_gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        return parameter.grad
