"""FQNs of a module's tensors, as its author wrote it, without wrappers' parts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require
from lightning_shard.text import did_you_mean

require(nn.Module, "_compiled_call_impl _non_persistent_buffers_set")

# The attributes under which wrappers hold the wrapped module. No user's module has these names.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a module's parameters and persistent buffers."""

    tensors: Mapping[str, Tensor]  # FQN to live tensor, each tensor once, in registration order.
    aliases: Mapping[str, str]  # FQN of a tied name to the FQN of the same tensor in ``tensors``.
    identities: Mapping[int, str]  # ``id`` of a live tensor to its FQN.
    prefixes: Mapping[str, str]  # Prefix in ``state_dict()`` (``""`` or with a dot at its end) to prefix of FQNs.

    def of(self, tensor: Tensor) -> str | None:
        """FQN of a live tensor, or None if the module does not have it."""
        return self.identities.get(id(tensor))

    def canonical(self, fqn: str) -> str:
        """The first registered name of the tensor ``fqn``, which may have wrappers' parts. ConfigurationError: none."""
        unwrapped = self.unwrapped(fqn)
        name = self.aliases.get(unwrapped, unwrapped)
        if name not in self.tensors:
            raise ConfigurationError(f"the module has no parameter {fqn!r}.{did_you_mean(fqn, self.tensors)}")
        return name

    def unwrapped(self, key: str) -> str:
        """FQN of a key of the module's ``state_dict()``, of tensors and extra state."""
        owner = key.rpartition(".")[0]
        while owner and f"{owner}." not in self.prefixes:
            owner = owner.rpartition(".")[0]
        start = f"{owner}." if owner else ""
        return self.prefixes[start] + key.removeprefix(start)


def fqns(module: nn.Module) -> Names:
    """FQNs of ``module``'s parameters and persistent buffers, without wrappers (DDP, compile, checkpointing, FSDP). The
    first registered name of a tied tensor is its name, the others are aliases.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    prefixes: dict[str, str] = {}
    for key, prefix, owner in _modules(module):
        prefixes[key] = prefix
        for name, tensor in own_tensors(owner).items():
            if not is_persistent(owner, name):
                continue
            fqn = prefix + name
            canonical = first.setdefault(id(tensor), fqn)
            if canonical == fqn:
                tensors[fqn] = tensor
            else:
                aliases[fqn] = canonical
    return Names(tensors=tensors, aliases=aliases, identities=first, prefixes=prefixes)


def parameter_names(module: nn.Module) -> dict[Any, str]:
    """Parameter to its first FQN, in registration order."""
    first: dict[nn.Parameter, str] = {}
    for _, prefix, owner in _modules(module):
        for name, parameter in owner.named_parameters(recurse=False):
            first.setdefault(parameter, prefix + name)
    return first


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """FQN to parameter: ``module.named_parameters()`` without wrappers' parts."""
    return {fqn: parameter for parameter, fqn in parameter_names(module).items()}


def unwrapped_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()``, each module once, without wrappers' parts in the names."""
    seen: set[int] = set()
    for _, prefix, part in _modules(module):
        if id(part) not in seen:
            seen.add(id(part))
            yield prefix.removesuffix("."), part


def without_wrappers(fqn: str) -> str:
    """``fqn`` without wrappers' parts, for names without a module."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPED)


def _modules(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Prefix in ``state_dict()``, prefix of FQNs and module, for each module under each name, in registration order."""
    found: dict[str, tuple[str, nn.Module]] = {"": ("", module)}
    for path, part in module.named_modules(remove_duplicate=False):
        above, _, name = path.rpartition(".")
        prefix, owner = found[above]
        wraps = name in _WRAPPED or (name == "module" and isinstance(owner, (DistributedDataParallel, DataParallel)))
        found[path] = prefix if wraps or not path else f"{prefix}{name}.", part
        yield f"{path}.".lstrip("."), found[path][0], part


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The direct parameters and buffers of ``module``, under each of their names there."""
    own: dict[str, Tensor] = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return {**own, **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each persistent buffer that has a value, under each of its keys in ``state_dict()``."""
    for key, _, owner in _modules(module):
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent(owner, name):
                yield key + name, buffer


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether ``state_dict()`` has the tensor ``name`` of ``module``."""
    return name not in module._non_persistent_buffers_set


def outside_graphs(root: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """``root`` and the modules below it, except those in a compiled module, whose hooks would be compiled in."""
    seen = set() if seen is None else seen
    if root in seen or root._compiled_call_impl is not None or isinstance(root, torch.jit.ScriptModule):
        return
    seen.add(root)
    yield root
    children = dict(root.named_children())
    if "_orig_mod" not in children and not hasattr(root.__dict__.get("forward"), "_torchdynamo_orig_callable"):
        for child in children.values():
            yield from outside_graphs(child, seen)


def class_name(module: nn.Module) -> str:
    """Name of a module's own class, without an engine's class in front (``FSDPBlock``)."""
    return own_class(module).__name__


def own_class(module: nn.Module) -> Any:
    """Class of a module, without an engine's class in front."""
    own = (c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed"))
    return next(c for c in own if c.__module__ != "abc")


def replace_tensors(root: nn.Module, make: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Replace each parameter and buffer by ``make`` of it, ties kept. Returns the undo."""
    # The replaced tensors are kept, so that their ids are not used again.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    before: list[tuple[nn.Module, str, Tensor]] = []
    for module in root.modules():
        for name, tensor in own_tensors(module).items():
            if id(tensor) not in made:
                made[id(tensor)] = tensor, of_its_class(tensor, make(tensor))
            if (new := made[id(tensor)][1]) is not tensor:
                setattr(module, name, new)
                before.append((module, name, tensor))

    def restore() -> None:
        for place in before:
            setattr(*place)

    return restore


def of_its_class(tensor: Tensor, made: Tensor) -> Tensor:
    """``made`` as a parameter if ``tensor`` is one."""
    is_parameter = isinstance(tensor, nn.Parameter) and made is not tensor
    return nn.Parameter(made, tensor.requires_grad) if is_parameter else made
