"""Detect parameters that are frozen, thawed or added after an engine has prepared a module."""

import torch
from torch import Tensor, nn

from lightning_shard.engines._fsdp2 import gathered_tensors
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.names import parameter_names
from lightning_shard.text import listed


class FreezingCheck:
    """Compares a module's trainable parameters with the last step's."""

    def __init__(self, module: nn.Module, *, frozen_too: bool, named: bool) -> None:
        """Record the parameters of ``module`` before it is trained. ``frozen_too``: the engine gathers frozen ones.
        ``named``: the engine identifies stepped parameters by name.
        """
        self._module, self._frozen_too, self._looks, self._stepped = module, frozen_too, 0, False
        self._parameters = list(module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        self._names = parameter_names(module) if named else {}

    def refuse_new(self) -> None:
        """Raise ConfigurationError for new or renamed parameters, except a unit's gathered ones."""
        known: set[Tensor] = {*self._parameters, *gathered_tensors(self._module)}
        found = parameter_names(self._module).items()
        if new := [n for p, n in found if p not in known and (self._frozen_too or p.requires_grad)]:
            raise ConfigurationError(
                f"{listed(new)} came after the model was set up to train, in a hook or a step of the fit: "
                "no engine reduces their gradients or shards them, and no optimizer has them. Make them in "
                "configure_model, setup or __init__."
            )
        if renamed := [f"{self._names[p]} ({n} now)" for p, n in found if n != self._names.get(p, n)]:
            raise ConfigurationError(
                f"{listed(renamed)} got other names after the model was set up to train, as by torch.nn.utils.prune "
                "in a hook of the fit, but are stepped and saved by name. Prune in configure_model, setup or __init__, "
                "or use shard_ddp in '32-true'."
            )

    def trainable_changed(self, batch_idx: int) -> bool:
        """Whether other parameters are trainable than at the last call. Raises ConfigurationError as `refuse_new`."""
        if batch_idx == 0 or self._looks < 2:  # after hooks and the first step, which may add parameters
            self.refuse_new()
            self._looks += 1
        before, self._trainable = self._trainable, [p.requires_grad for p in self._parameters]
        return self._trainable != before

    def after_forward(self) -> None:
        """Call `refuse_new` between the first step's forward and backward."""
        if not self._stepped:
            self.refuse_new()
        self._stepped = True

    def refuse_without_masters(self, master: torch.dtype) -> None:
        """Raise ConfigurationError if a thawed parameter, loaded in 16 bits and frozen, has no ``master`` weights."""
        stepped = [p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()]
        if thawed := [dtype for dtype in stepped if dtype not in (master, torch.float64)]:
            raise ConfigurationError(
                f"{len(thawed)} parameters were thawed that were frozen in {thawed[0]} when the fit began, and so have "
                f"no {master} masters. Load them in {master}, or have them trainable when the fit begins."
            )
