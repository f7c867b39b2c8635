"""Finding the live tensor of a name, whichever engine holds it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.flat_shard import FlatPiece, FlatTensor
from lightning_shard.checkpoint.state import Names
from lightning_shard.checkpoint.stepped import AnyOptimizer, FlatOptimizer
from lightning_shard.engines.whole import LiveTensor
from lightning_shard.errors import ConfigurationError


def canonical(names: Names, fqn: str) -> str:
    """The name under which the module registers the parameter or buffer ``fqn`` first.

    Raises:
        ConfigurationError: there is none, with the nearest names.
    """
    name = names.aliases.get(fqn, fqn)
    if name not in names.tensors:
        near = difflib.get_close_matches(fqn, names.tensors, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigurationError(f"the module has no parameter {fqn!r}.{hint}")
    return name


def slot_of(optimizers: Sequence[AnyOptimizer], parameter: Tensor, fqn: str, slot: str) -> LiveTensor | None:
    """The optimizer's slot of a parameter; None where no optimizer has it."""
    for optimizer in optimizers:
        found = _flat_slot(optimizer, fqn, slot) if isinstance(optimizer, FlatOptimizer) else None
        if isinstance(optimizer, Optimizer) and parameter in optimizer.state:
            found = optimizer.state[parameter].get(slot)
        if found is not None:
            return found if isinstance(found, Tensor | FlatTensor) else torch.as_tensor(found)
    return None


def _flat_slot(optimizer: FlatOptimizer, fqn: str, slot: str) -> LiveTensor | None:
    for group in optimizer.groups:
        for member in group.members:
            if member.fqn != fqn or not member.stepped:
                continue
            value = optimizer.optimizer.state.get(group.flat, {}).get(slot)
            if value is not None and isinstance(value, Tensor) and value.shape == group.flat.shape:
                part = value.detach().narrow(0, member.offset, member.length)
                return FlatTensor(member.shape, value.dtype, [FlatPiece(part, member.start)])
            if value is not None:
                return torch.as_tensor(value)
    return None


def own_or(live: Mapping[str, LiveTensor], names: Names, fqn: str) -> LiveTensor:
    """What is stepped of a parameter: in ``live``, or else the module's own tensor."""
    return live.get(fqn, names.tensors[fqn])
