"""Writes to FSDP2's parameters that no optimizer makes, such as those to the teacher of a moving average, which torch
loses: ``parameter.data = ...`` changes nothing of a DTensor, and what is written to a gathered parameter is freed.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.engines._fsdp2 import full_parameters, gathered_parameters, units_of
from lightning_shard.engines.observed import observed
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.full import own_part
from lightning_shard.tensors.tracing import version
from lightning_shard.text import listed


def assigned_in_place() -> AbstractContextManager[None]:
    """Let ``parameter.data = value`` write the shard of a DTensor inside."""
    return observed(DTensor, "data", lambda _, data: data, _write_shard)


@torch.no_grad()
def _write_shard(parameter: DTensor, value: Tensor) -> bool:
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ConfigurationError(
            f"parameter.data is set to a {type(value).__name__} of {tuple(value.shape)} and {value.dtype}, but the "
            f"parameter is sharded, of {tuple(parameter.shape)} and {parameter.dtype}: the value must be computed "
            "from sharded parameters and have their shape and dtype. Use set_full_tensor for a full value."
        )
    placed = value.redistribute(parameter.device_mesh, parameter.placements)
    parameter.to_local().copy_(placed.to_local())
    return True


class WrittenInSteps:
    """Takes over what a step writes to gathered parameters frozen when sharded; to others it must not write, nor a
    module's forward to any. Writes are seen by autograd's count of them, so that nothing waits for the device.
    """

    def __init__(self, root: nn.Module, shards: Mapping[Tensor, str]) -> None:
        self._units = units_of(root)
        self._names = shards
        self._frozen = {parameter for parameter in self._names if not parameter.requires_grad}
        self._lost: set[str] = set()
        # FSDP keeps the objects that it gathers into, and its own writes are not counted.
        self._seen = {id(full): version(full) for unit in self._units for _, full, _ in full_parameters(unit)}
        self._read: set[int] = set()
        self._closing = ExitStack()
        for unit in self._units:
            # Before FSDP's own hooks, which free what was gathered.
            self._closing.callback(unit.register_forward_hook(partial(self._look, unit), prepend=True).remove)
        self._closing.enter_context(observed(nn.Parameter, "data", self._data_of, lambda *_: False))

    def close(self) -> None:
        self._closing.close()

    def _data_of(self, parameter: Tensor, data: Tensor) -> Tensor:
        for unit in self._units:
            for shard, full, _ in full_parameters(unit):
                if full is parameter and shard.requires_grad:
                    return parameter.detach()  # Its writes are counted.
                if full is parameter:
                    self._read.add(id(full))
        return data

    @torch.no_grad()
    def _look(self, unit: Any, *forward: Any) -> None:
        # Those of the root, and what the step itself writes, are there at the step's end.
        frozen_too = forward and unit is not self._units[0]
        for shard, full, memory in gathered_parameters(unit):
            if (shard.requires_grad or frozen_too) and self._is_written(shard, full, memory):
                self._lost.add(self._names[shard])

    def _may_be_written(self, full: Tensor, memory: Tensor) -> bool:
        now = version(full)
        before, self._seen[id(full)] = self._seen.get(id(full), 0), now
        # ``data`` of frozen ones is not counted.
        return now != before or full.data_ptr() != memory.data_ptr() or id(full) in self._read

    def _is_written(self, shard: DTensor, full: Tensor, memory: Tensor) -> bool:
        # The first writes of an average may round to nothing.
        return self._may_be_written(full, memory) and (shard.requires_grad or not _has_its_values(full, shard))

    @torch.no_grad()
    def take_over(self) -> None:
        """At the end of a step, while what it gathered is there: write it into the shards. All ranks call it.
        ConfigurationError: the step, or a module's forward, wrote to a trainable parameter, or a module's forward to
        any, or the step to one in a dtype of fewer digits.
        """
        for unit in self._units:
            # The step is not the root's forward.
            self._look(unit)
        for unit in self._units if self._frozen else []:
            for shard, full, memory in gathered_parameters(unit):
                if shard not in self._frozen or shard.requires_grad or self._names[shard] in self._lost:
                    continue
                if full.dtype != shard.dtype:
                    if self._is_written(shard, full, memory):
                        self._lost.add(self._names[shard])
                elif self._may_be_written(full, memory):  # An offloaded one waits for the device.
                    shard.to_local().copy_(own_part(full, shard))
                if full.data_ptr() != memory.data_ptr():
                    # The step set ``parameter.data``; FSDP gathers into its own memory.
                    place = memory.data[: full.numel()].view(full.shape)
                    place.copy_(full)
                    full.data = place
        self._read.clear()
        if self._lost:
            raise ConfigurationError(
                f"The step writes to {listed(sorted(self._lost))} while gathered, such as with clamp_ in forward: "
                "that is a copy, which is freed with what was written, or has fewer digits than the masters. Write to "
                "them outside of the step, such as in on_train_batch_start or on_train_batch_end, or to a "
                "parametrization (torch.nn.utils.parametrize); or use shard_ddp in '32-true'."
            )


def _has_its_values(full: Tensor, shard: DTensor) -> bool:
    own = own_part(full, shard)
    return torch.allclose(own, shard.to_local().to(own), rtol=0, atol=0, equal_nan=True)
