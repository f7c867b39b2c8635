"""A module's tensors under the names that a checkpoint knows them by.

Names are fully qualified names in the unwrapped module: those of the module as its author wrote it, whatever
wraps it or parts of it now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_shard.checkpoint.flat_shard import FlatTensor
from lightning_shard.checkpoint.layout import model_key
from lightning_shard.errors import CheckpointError, CheckpointMismatchError

# The attributes under which wrappers hold what they wrap; no user's module has these names.
WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a module's parameters and persistent buffers."""

    tensors: Mapping[str, Tensor]
    """FQN to live tensor, each tensor once, in the order in which the module registers them."""

    aliases: Mapping[str, str]
    """FQN of a tied name to the FQN of the same tensor in ``tensors``."""

    identities: Mapping[int, str]
    """``id`` of a live tensor to its FQN."""

    def of(self, tensor: Tensor) -> str | None:
        """FQN of a live tensor; None if the module does not have it."""
        return self.identities.get(id(tensor))


def fqns(module: nn.Module) -> Names:
    """The names of the parameters and persistent buffers of ``module``, wrapped or not.

    DistributedDataParallel, ``torch.compile``, activation-checkpoint and FSDP wrappers leave no trace in a name. A
    tensor with several names goes by the one that is registered first; the others are aliases.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for owner, prefix in _modules(module, ""):
        for name, tensor in _own_tensors(owner):
            fqn = prefix + name
            canonical = first.setdefault(id(tensor), fqn)
            if canonical == fqn:
                tensors[fqn] = tensor
            else:
                aliases[fqn] = canonical
    return Names(tensors=tensors, aliases=aliases, identities=first)


def _modules(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str]]:
    """Each module under each of its names, wrappers' names left out, in registration order."""
    yield module, prefix
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, prefix if _is_wrapper_name(module, name) else f"{prefix}{name}.")


def _is_wrapper_name(parent: nn.Module, name: str) -> bool:
    return name in WRAPPED or (name == "module" and isinstance(parent, (DistributedDataParallel, DataParallel)))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def model_tensors(
    module: nn.Module, masters: Mapping[str, Tensor | FlatTensor] | None = None
) -> dict[str, Tensor | FlatTensor]:
    """``model.<fqn>`` to live tensor: trainable and frozen parameters and persistent buffers, each once.

    ``masters``: FQN, a tied one too, to what stands for the module's own tensor. FSDP modules must be in their
    sharded state (see `reshard`). Raises CheckpointError for a master of what the module does not have.
    """
    names = fqns(module)
    tensors: dict[str, Tensor | FlatTensor] = dict(names.tensors)
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
    clean = _clean_names(module)
    known = fqns(module)
    extra: dict[str, Any] = {}
    for raw, value in module.state_dict(keep_vars=True).items():
        name = _clean(raw, clean)
        if name not in known.tensors and name not in known.aliases:
            extra[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return extra


def load_extra_state(module: nn.Module, extra: Mapping[str, Any], *, strict: bool = True) -> None:
    """Give `extra_state` back to a module that is wrapped in another way or not at all.

    Raises CheckpointMismatchError where ``strict`` and the module has no place for an entry.
    """
    if not extra:
        return
    raw_names = {_clean(raw, _clean_names(module)): raw for raw in module.state_dict(keep_vars=True)}
    unknown = sorted(name for name in extra if name not in raw_names)
    if unknown and strict:
        raise CheckpointMismatchError(
            f"the checkpoint has extra state that no module takes: {', '.join(unknown)}; load with strict=False to "
            "leave it out"
        )
    module.load_state_dict({raw_names[name]: value for name, value in extra.items() if name in raw_names}, strict=False)


def _clean_names(module: nn.Module) -> dict[str, str]:
    """Prefix in ``named_modules`` to clean prefix."""
    found: dict[str, str] = {}

    def visit(part: nn.Module, raw: str, clean: str) -> None:
        found[raw] = clean
        for name, child in part._modules.items():
            if child is not None:
                visit(child, f"{raw}{name}.", clean if _is_wrapper_name(part, name) else f"{clean}{name}.")

    visit(module, "", "")
    return found


def _clean(raw: str, prefixes: Mapping[str, str]) -> str:
    owner = raw.rpartition(".")[0]
    while owner and f"{owner}." not in prefixes:
        owner = owner.rpartition(".")[0]
    start = f"{owner}." if owner else ""
    return prefixes[start] + raw.removeprefix(start)
