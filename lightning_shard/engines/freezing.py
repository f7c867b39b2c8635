"""Which parameters are frozen, thawed or made once an engine has prepared a module."""

import torch
from torch import Tensor, nn

from lightning_shard.engines._fsdp2 import gathered_tensors
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.names import parameter_names
from lightning_shard.text import listed


class Freezing:
    """What was trainable at the last look."""

    def __init__(self, module: nn.Module, *, frozen_too: bool, named: bool) -> None:
        """Look at ``module`` as its engine is about to train it; ``frozen_too``: that gathers frozen parameters;
        ``named``: that knows what it steps by name.
        """
        self._module, self._frozen_too, self._looks, self._stepped = module, frozen_too, 0, False
        self._parameters = list(module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        self._names = parameter_names(module) if named else {}

    def refuse_new(self) -> None:
        """Refuse parameters (ConfigurationError) that came since and are no gathered ones of a unit, and new names."""
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
                f"{listed(renamed)} got other names after the model was set up to train, as torch.nn.utils.prune gives "
                "in a hook of the fit, but are stepped and saved by name. Prune in configure_model, setup or __init__, "
                "or use shard_ddp in '32-true'."
            )

    def changed(self, batch_idx: int) -> bool:
        """Whether other parameters are trainable than at the last look; ConfigurationError as `refuse_new`."""
        if batch_idx == 0 or self._looks < 2:  # at what hooks made, and the first step
            self.refuse_new()
            self._looks += 1
        before, self._trainable = self._trainable, [p.requires_grad for p in self._parameters]
        return self._trainable != before

    def after_forward(self) -> None:
        """Refuse, as `refuse_new`, what the first step made, ahead of its backward."""
        if not self._stepped:
            self.refuse_new()
        self._stepped = True

    def refuse_without_masters(self, master: torch.dtype) -> None:
        """ConfigurationError: a thawed parameter has no ``master`` weights: it was loaded in 16 bits and frozen."""
        stepped = [p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()]
        if thawed := [dtype for dtype in stepped if dtype not in (master, torch.float64)]:
            raise ConfigurationError(
                f"{len(thawed)} parameters were thawed that were frozen in {thawed[0]} when the fit began, and so have "
                f"no {master} masters. Load them in {master}, or let the fit begin with them trainable."
            )
