"""Writes to FSDP2's parameters that no optimizer makes, such as those to the teacher of a moving average, which torch
loses: ``parameter.data = ...`` changes nothing of a DTensor, and what is written to a gathered parameter is freed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.engines._fsdp2 import gathered_parameters, units_of
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.full import own_part
from lightning_shard.tensors.names import parameter_names

_COMPARED = 3  # Steps in which values are compared, which waits for the device.

_AVERAGED = 8
"""Steps in which frozen parameters that are cast are compared; the first ones of an average may round to nothing."""


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
    """Takes over what a step writes to gathered parameters frozen when sharded; a module's forward must not write."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._units = units_of(root)
        self._names = {p: n for p, n in parameter_names(root).items() if isinstance(p, DTensor)}
        self._frozen = {parameter for parameter in self._names if not parameter.requires_grad}
        self._lost: set[str] = set()
        self._steps = 0
        # Before FSDP's own hooks, which free what was gathered.
        self._hooks = [unit.register_forward_hook(self._compare, prepend=True) for unit in self._units]

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def _compare(self, unit: Any, *arguments: Any) -> None:
        for shard, full, _ in gathered_parameters(unit):
            if (shard.requires_grad or unit is not self._root) and not _has_its_values(full, shard):
                self._lost.add(self._names[shard])

    @torch.no_grad()
    def take_over(self) -> None:
        """At the end of a step, while what it gathered is there: write it into the shards. All ranks call it.
        ConfigurationError: a module's forward wrote to its parameters, or the step to one in a dtype of fewer digits.
        """
        self._steps += 1
        if self._hooks:
            # The step is not the root's forward.
            self._compare(self._root)
        for unit in self._units if self._frozen else []:
            for shard, full, memory in gathered_parameters(unit):
                if shard not in self._frozen or shard.requires_grad or self._names[shard] in self._lost:
                    continue
                if full.dtype == shard.dtype:
                    shard.to_local().copy_(own_part(full, shard))
                elif self._steps <= _AVERAGED and not _has_its_values(full, shard):
                    self._lost.add(self._names[shard])
                if full.data_ptr() != memory.data_ptr():
                    # The step set ``parameter.data``; FSDP gathers into its own memory.
                    memory.data.copy_(full)
                    full.data = memory
        last = _AVERAGED if self._frozen else _COMPARED
        if self._steps <= last and (lost := set().union(*Ranks.of().gather(self._lost))):
            raise ConfigurationError(
                f"The step writes to {', '.join(sorted(lost))} while gathered, such as with clamp_ in forward: that is "
                "a copy, which is freed with what was written, or has fewer digits than the masters. Write to them "
                "outside of the step, such as in on_train_batch_start or on_train_batch_end, or to a parametrization "
                "(torch.nn.utils.parametrize); or use shard_ddp in '32-true'."
            )
        if self._steps == _COMPARED:
            self.close()


def _has_its_values(full: Tensor, shard: DTensor) -> bool:
    own = own_part(full, shard)
    return torch.allclose(own, shard.to_local().to(own), rtol=0, atol=0, equal_nan=True)
