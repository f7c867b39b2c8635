"""Turn a sharded module back into a plain one after a run: its own classes, full parameters, no hooks."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.tensor import DTensor

from lightning_shard.engines.memory_breakdown import is_sharded
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.casting import OWN_FORWARD
from lightning_shard.private_names import require
from lightning_shard.tensors.flat import FlatTensor, LiveTensor
from lightning_shard.tensors.full import gather_full
from lightning_shard.tensors.names import named_parameters, own_class

require(nn.Module, "_parameters")
require(_composable_state, "_module_state_mapping")

_GUARDS = "_shard_guards"
_MOVES = ("to", "cpu", "cuda")  # Another Trainer calls them at its start and end.
_MASTERS = "_shard_zero_masters"
_MARKS = ("_shard", "__composable_api", "ds_")
_MARKED = {"_external_params", "_fsdp_use_orig_params", "_is_fsdp_managed_module", "_original_parameters"}
"""Attributes that FSDP2, DeepSpeed and this package set on modules, by prefix and by name."""


def guard_module(root: nn.Module) -> None:
    """Refuse calls and ``state_dict`` of modules with sharded parameters under ``root``, and moves of ``root``, until
    `unguard_module`.
    """
    unguard_module(root)
    hooks: list[Any] = []
    for module in root.modules():
        if any(map(is_sharded, module.parameters())):
            hooks.append(module.register_forward_pre_hook(partial(_refuse, "called"), prepend=True))
            hooks.append(module.register_state_dict_pre_hook(_refuse_values))
    if hooks:
        vars(root).update({_GUARDS: hooks, **dict.fromkeys(_MOVES, partial(_refuse, "moved", root))})


def unguard_module(root: nn.Module) -> None:
    """Allow a run to use the modules under ``root``."""
    for hook in vars(root).pop(_GUARDS, ()):
        hook.remove()
    for name in [name for name in _MOVES if _is_engines(vars(root).get(name))]:
        del vars(root)[name]


@contextmanager
def allow_state_dict(root: nn.Module) -> Generator[None, None, None]:
    """Allow ``state_dict`` of the modules under ``root`` in this context, for a checkpoint after a run."""
    is_guarded = _GUARDS in vars(root)
    unguard_module(root)
    try:
        yield
    finally:
        if is_guarded:
            guard_module(root)


def _refuse_values(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # a checkpoint reads the live tensors
        _refuse("asked for its state_dict", module)


def _refuse(what: str, module: nn.Module, *arguments: Any, **options: Any) -> None:
    raise ConfigurationError(
        f"{type(module).__name__} is {what} outside of a run, but its parameters are sharded over the ranks since the "
        "last one. Call lightning_shard.unshard(module) on all ranks first, or set unshard_after_fit: true on the "
        "strategy. The Trainer's fit, validate, test, predict and save_checkpoint need neither."
    )


def unshard_module(root: nn.Module, *, device: torch.device, keep: bool = True) -> None:
    """Give the modules under ``root`` their own classes, and full parameters on ``device`` with the masters' values.
    Without ``keep`` this rank's parameters are on the meta device. All ranks call it, while no engine runs.
    """
    parameters, masters = named_parameters(root), vars(root).get(_MASTERS)
    made: dict[Any, nn.Parameter] = {}
    for fqn, parameter in parameters.items():
        live = _live(fqn, parameter, masters)
        full = live.detach() if isinstance(live, Tensor) and not isinstance(live, DTensor) else _gather(live)
        made[parameter] = nn.Parameter(full.to(device if keep else "meta"), parameter.requires_grad)
    for module in list(root.modules()):
        own = {n: made[p] for n, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        absent = {name: None for name, parameter in dict.items(module._parameters) if parameter is None}
        _remove_marks(module)
        vars(module)["_parameters"] = {**own, **absent}
    if keep:
        root.to(device)


def _live(fqn: str, parameter: Any, masters: Any) -> LiveTensor:
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    if masters is None:
        raise ConfigurationError(
            "the LightningModule has the masters of parameters that stage 3 has sharded. Unshard the LightningModule, "
            "and then take the submodule."
        )
    from lightning_shard.engines.zero import flat_layout

    if fqn in masters:
        return FlatTensor(flat_layout.full_shape(parameter), masters[fqn].data.dtype, [masters[fqn]])
    return flat_layout.parameter_shard(parameter)


def _gather(live: LiveTensor) -> Tensor:
    reduces_on_host = "gloo" in dist.get_backend()
    device = torch.device("cpu") if reduces_on_host else torch.device("cuda", torch.cuda.current_device())
    return gather_full(live, device=device)


def _remove_marks(module: nn.Module) -> None:
    attributes = vars(module)
    forward: Callable[..., Any] | None = attributes.get(OWN_FORWARD)
    if OWN_FORWARD in attributes:
        attributes.pop("forward", None)
    for name, value in list(attributes.items()):
        if name in _MARKED or name.startswith(_MARKS) or _is_engines(value):
            del attributes[name]
        elif isinstance(value, dict):  # such as hooks
            for key in [key for key, each in dict.items(value) if _is_engines(each)]:
                del value[key]
    module.__class__ = own_class(module)
    _composable_state._module_state_mapping.pop(module, None)  # so that FSDP2 can shard the module again
    if forward is not None:
        attributes["forward"] = forward


def _is_engines(value: Any) -> bool:
    """Whether ``value`` is a function or a class from an engine's module, also in partials and methods."""
    value = getattr(value, "hook", value)  # torch wraps some hooks
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    if isinstance(value, FunctionType):
        maker = value.__globals__["__name__"]
    elif isinstance(value, type):
        maker = value.__module__
    else:
        return False
    return maker.startswith(("lightning_shard.", "deepspeed.", "torch.distributed."))
