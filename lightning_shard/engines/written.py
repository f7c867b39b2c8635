"""Writes to FSDP2's parameters that no optimizer makes, such as those to the teacher of a moving average.

torch loses them without a word: setting ``parameter.data`` changes nothing of a DTensor, and what is written to a
gathered parameter is freed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lightning_shard.engines._fsdp2 import gathered_parameters
from lightning_shard.errors import ConfigurationError

_COMPARED = 8
"""Steps in which frozen parameters that are cast are looked at; the first ones of an average may round to nothing."""


def assign_in_place() -> Callable[[], None]:
    """Let ``parameter.data = value`` write the shard of a DTensor, until the returned function is called."""
    if "data" in vars(DTensor):
        return lambda: None
    plain: Any = Tensor.data

    @torch.no_grad()
    def write(parameter: DTensor, value: Tensor) -> None:
        if not isinstance(value, DTensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            raise ConfigurationError(
                f"parameter.data is set to a {type(value).__name__} of {tuple(value.shape)} and {value.dtype}, but the "
                f"parameter is sharded, of {tuple(parameter.shape)} and {parameter.dtype}: the value must be computed "
                "from sharded parameters and have their shape and dtype. Use set_full_tensor for a full value."
            )
        placed = value.redistribute(parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(placed.to_local())

    DTensor.data = property(plain.__get__, write)  # type: ignore[assignment]
    return lambda: delattr(DTensor, "data")


class WrittenInSteps:
    """Takes over what a step writes to gathered parameters that were frozen when the module was sharded."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._frozen = {p: n for n, p in root.named_parameters() if not p.requires_grad and isinstance(p, DTensor)}
        self._steps = 0

    @torch.no_grad()
    def take_over(self) -> None:
        """At the end of a step, while what it gathered is there: write it into the shards. No communication.

        Raises:
            ConfigurationError: the step wrote to a parameter that it has in a dtype of fewer digits.
        """
        self._steps += 1
        units = [m for m in self._root.modules() if isinstance(m, FSDPModule)] if self._frozen else []
        for shard, full, memory in (found for unit in units for found in gathered_parameters(unit)):
            if shard not in self._frozen or shard.requires_grad:
                continue
            local, own = shard.to_local(), _own_part(full, shard)
            if full.dtype == shard.dtype:
                local.copy_(own)
            elif self._steps <= _COMPARED and not torch.equal(own, local.to(own)):
                raise ConfigurationError(
                    f"The step writes to {self._frozen[shard]}, which is gathered in {full.dtype} there while its "
                    f"values are {shard.dtype}: what is written would be lost. Write to it outside of the step, such "
                    "as in on_train_batch_start or on_train_batch_end."
                )
            if full.data_ptr() != memory.data_ptr():
                # The step set ``parameter.data``; FSDP gathers into its own memory.
                memory.data.copy_(full)
                full.data = memory


def _own_part(full: Tensor, shard: DTensor) -> Tensor:
    """This rank's part of a gathered parameter."""
    for axis, placement in enumerate(shard.placements):
        if isinstance(placement, Shard):
            parts = full.chunk(shard.device_mesh.size(axis), placement.dim)
            rank = shard.device_mesh.get_local_rank(axis)
            full = parts[rank] if rank < len(parts) else full.narrow(placement.dim, 0, 0)
    return full
