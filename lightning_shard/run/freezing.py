"""Parameters that are frozen and thawed in the course of a fit, as ``BackboneFinetuning`` does between epochs."""

import torch
from torch import nn

from lightning_shard.errors import ConfigurationError


class Freezing:
    """What was trainable at the last look."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]

    def changed(self, master: torch.dtype) -> bool:
        """Whether other parameters are trainable than at the last look.

        ConfigurationError: a thawed parameter has no ``master`` weights: it was loaded in 16 bits and frozen.
        """
        trainable = [p.requires_grad for p in self._parameters]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        stepped = [p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()]
        if thawed := [dtype for dtype in stepped if dtype != master]:
            raise ConfigurationError(
                f"{len(thawed)} parameters were thawed that were frozen in {thawed[0]} when the fit began, and so have "
                f"no {master} masters. Load them in {master}, or let the fit begin with them trainable."
            )
        return True
