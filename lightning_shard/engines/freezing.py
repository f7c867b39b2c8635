"""Parameters that are frozen, thawed or made once an engine has prepared a module."""

import torch
from torch import nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.names import named_parameters


class Freezing:
    """What was trainable at the last look."""

    def __init__(self, module: nn.Module, *, frozen_too: bool) -> None:
        """Look at ``module`` as its engine is about to train it; ``frozen_too``: that gathers frozen parameters."""
        self._module, self._frozen_too, self._looked = module, frozen_too, False
        self._parameters = list(module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]

    def refuse_new(self) -> None:
        """Refuse parameters that came since (ConfigurationError); engines put their own in the place of known ones."""
        known = set(self._parameters)
        found = named_parameters(self._module).items()
        if new := [n for n, p in found if p not in known and (self._frozen_too or p.requires_grad)]:
            raise ConfigurationError(
                f"{', '.join(new[:4])} came after the model was set up to train, in a hook of the fit: no engine "
                "reduces their gradients or shards them. Make them in configure_model, setup or __init__."
            )

    def changed(self, batch_idx: int) -> bool:
        """Whether other parameters are trainable than at the last look; ConfigurationError as `refuse_new`."""
        if batch_idx == 0 or not self._looked:
            self.refuse_new()
            self._looked = True
        before, self._trainable = self._trainable, [p.requires_grad for p in self._parameters]
        return self._trainable != before

    def refuse_without_masters(self, master: torch.dtype) -> None:
        """ConfigurationError: a thawed parameter has no ``master`` weights: it was loaded in 16 bits and frozen."""
        stepped = [p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()]
        if thawed := [dtype for dtype in stepped if dtype != master]:
            raise ConfigurationError(
                f"{len(thawed)} parameters were thawed that were frozen in {thawed[0]} when the fit began, and so have "
                f"no {master} masters. Load them in {master}, or let the fit begin with them trainable."
            )
