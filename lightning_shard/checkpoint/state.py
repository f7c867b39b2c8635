"""A module's tensors and extra state under the names that a checkpoint knows them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.checkpoint.layout import model_key
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import fqns


def model_tensors(module: nn.Module, masters: Mapping[str, LiveTensor] | None = None) -> dict[str, LiveTensor]:
    """``model.<fqn>`` to live tensor: trainable and frozen parameters and persistent buffers, each once.

    ``masters``: FQN, a tied one too, to what stands for the module's own tensor. FSDP modules must be in their
    sharded state (see `reshard`). Raises CheckpointError for a master of what the module does not have.
    """
    names = fqns(module)
    tensors: dict[str, LiveTensor] = dict(names.tensors)
    unknown = []
    for fqn, master in (masters or {}).items():
        canonical = names.aliases.get(fqn, fqn)
        if canonical in tensors:
            tensors[canonical] = master
        else:
            unknown.append(fqn)
    if unknown:
        raise CheckpointError(
            f"masters are given for {', '.join(sorted(unknown)[:5])}, but the module has no tensor of that name: name "
            "them as the unwrapped module does"
        )
    return {model_key(fqn): tensor for fqn, tensor in tensors.items()}


def model_aliases(module: nn.Module) -> dict[str, str]:
    """``model.<fqn>`` of each tied name to the key that holds its tensor."""
    return {model_key(alias): model_key(fqn) for alias, fqn in fqns(module).aliases.items()}


def reshard(module: nn.Module) -> None:
    """Put every FSDP module into its sharded state, in which its parameters are what the optimizer steps."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def extra_state(module: nn.Module) -> dict[str, Any]:
    """What ``module.state_dict()`` has beyond parameters and persistent buffers, by clean name.

    ``get_extra_state`` of modules and persistent states of torchmetrics are such things.
    """
    known = fqns(module)
    extra: dict[str, Any] = {}
    for raw, value in module.state_dict(keep_vars=True).items():
        name = known.unwrapped(raw)
        if name not in known.tensors and name not in known.aliases:
            extra[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return extra


def load_extra_state(module: nn.Module, extra: Mapping[str, Any], *, strict: bool = True) -> None:
    """Give `extra_state` back to a module that is wrapped in another way or not at all.

    Raises CheckpointMismatchError where ``strict`` and the module has no place for an entry.
    """
    if not extra:
        return
    names = fqns(module)
    raw_names = {names.unwrapped(raw): raw for raw in module.state_dict(keep_vars=True)}
    unknown = sorted(name for name in extra if name not in raw_names)
    if unknown and strict:
        raise CheckpointMismatchError(
            f"the checkpoint has extra state that no module takes: {', '.join(unknown)}; load with strict=False to "
            "leave it out"
        )
    module.load_state_dict({raw_names[name]: value for name, value in extra.items() if name in raw_names}, strict=False)
