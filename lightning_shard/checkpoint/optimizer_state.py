"""A module's tensors and extra state, and optimizer state by parameter name, as a checkpoint stores them.

A slot of its parameter's shape is stored and sharded like the parameter. A scalar tensor is stored for each of the
parameters that share it. Slots that are no tensors, and hyperparameters of groups, go to ``trainer.pt``. The parameters
in a flat tensor are listed by its `FlatOptimizer`.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.files.layout import SlotName
from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state, parts
from lightning_shard.errors import CheckpointError, CheckpointMismatchError, ConfigurationError
from lightning_shard.ranks import warn_on_first_rank
from lightning_shard.tensors import flat
from lightning_shard.tensors.flat import AnyOptimizer, FlatMember, FlatOptimizer, LiveTensor, OwnedOptimizer
from lightning_shard.tensors.names import Names, fqns
from lightning_shard.text import listed


def sharded_names(module: nn.Module) -> Names:
    """Reshard all FSDP modules, so that the parameters are those that the optimizer steps, and return their names."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return fqns(module)


def live_tensors(names: Names, masters: Mapping[str, LiveTensor] | None = None) -> dict[str, LiveTensor]:
    """FQN to each parameter and persistent buffer, or its master. ConfigurationError: a master of an unknown name."""
    return {**names.tensors, **{names.canonical(fqn): master for fqn, master in (masters or {}).items()}}


def extra_state(module: nn.Module, names: Names) -> dict[str, Any]:
    """Entries of ``module.state_dict()`` besides tensors (``get_extra_state``, metrics), by name without wrappers."""
    extra: dict[str, Any] = {}
    for key, value in _state_dict(module).items():
        name = names.unwrapped(key)
        # A hook may rename a tensor.
        if name not in names.tensors and name not in names.aliases and names.of(value) is None:
            extra[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return extra


def load_extra_state(module: nn.Module, names: Names, extra: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load `extra_state` under any wrapping. CheckpointMismatchError if ``strict`` and no module takes an entry."""
    if not extra:
        return
    keys = {names.unwrapped(key): key for key in _state_dict(module)}
    unknown = [name for name in extra if name not in keys]
    if unknown and strict:
        raise CheckpointMismatchError(
            f"the checkpoint has extra state that no module takes: {listed(sorted(unknown))}; load with strict=False "
            "to leave it out"
        )
    module.load_state_dict({keys[name]: value for name, value in extra.items() if name in keys}, strict=False)


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()``, with the live tensors if its override takes ``keep_vars``."""
    takes = inspect.signature(module.state_dict).parameters.values()
    live = any(each.name == "keep_vars" or each.kind == each.VAR_KEYWORD for each in takes)
    return module.state_dict(keep_vars=True) if live else module.state_dict()


def left_out(module: nn.Module, names: Names) -> set[str]:
    """Names, tied ones too, of tensors that an override of ``state_dict()`` leaves out. Renaming is not leaving out."""
    homes = {**{name: name for name in names.tensors}, **names.aliases}
    found = _state_dict(module)
    if homes.keys() <= {names.unwrapped(key) for key in found}:
        return set()
    stock = nn.Module.state_dict(module, keep_vars=True)
    if any(isinstance(found[key], Tensor) for key in found.keys() - stock.keys()):
        found = stock
    known = {name for key in found.keys() & stock.keys() for name in (names.unwrapped(key), names.of(stock[key]))}
    kept = {home for name, home in homes.items() if name in known}
    return {name for name, home in homes.items() if home not in kept}


# Name to value, of non-tensor slots of a parameter or hyperparameters of a group.
Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepped:
    """A tensor that an optimizer steps and keys its state by, with the parameters in it."""

    tensor: Tensor
    names: tuple[str, ...]  # FQNs of the parameters, frozen ones in the group too
    shapes: Mapping[str, tuple[int, ...]]  # FQN to full shape, of those that can have state
    flat: Mapping[str, FlatMember] | None = None  # FQN to slice; None if the tensor is a module's parameter or DTensor
    new_slot: Callable[[str], Tensor] | None = None  # `FlatGroup.new_slot`
    elsewhere: bool = False  # True if another rank steps the full parameter and has all of its state

    @property
    def is_sharded(self) -> bool:
        """True if other ranks may have other parts. A slot must then be a scalar or of the parameter's shape."""
        return self.flat is not None or isinstance(self.tensor, DTensor)

    def view(self, fqn: str, slot: Tensor) -> LiveTensor:
        """A view of the part of a slot tensor that belongs to one parameter. A scalar belongs to each."""
        return slot if self.flat is None or slot.shape != self.tensor.shape else self.flat[fqn].view(slot)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    settings: dict[str, Any]  # the live parameter group
    stepped: list[Stepped]

    @property
    def names(self) -> list[str]:
        return [fqn for part in self.stepped for fqn in part.names]


def groups_of(index: int, optimizer: AnyOptimizer, names: Names) -> list[Group]:
    """The parameter groups of optimizer ``index``, the same on every rank except for the parts of tensors."""
    groups: dict[int, Group] = {}
    if not isinstance(optimizer, FlatOptimizer):
        groups = {id(g): Group(settings=g, stepped=[]) for g in flat.torch_optimizer(optimizer).param_groups}
    for settings, part in _stepped(index, optimizer, names):
        groups.setdefault(id(settings), Group(settings=settings, stepped=[])).stepped.append(part)
    return list(groups.values())


def _stepped(index: int, optimizer: AnyOptimizer, names: Names) -> Iterator[tuple[dict[str, Any], Stepped]]:
    if isinstance(optimizer, FlatOptimizer):
        for group in optimizer.groups:
            members = {names.canonical(member.fqn): member for member in group.members}
            stepped = {fqn: member for fqn, member in members.items() if member.stepped}
            shapes = {fqn: tuple(member.shape) for fqn, member in stepped.items()}
            more: dict[str, Any] = {"flat": stepped, "new_slot": group.new_slot}
            yield group.group, Stepped(tensor=group.flat, names=tuple(members), shapes=shapes, **more)
    elif isinstance(optimizer, OwnedOptimizer):
        for owned in optimizer.parameters:
            fqn, elsewhere = names.canonical(owned.fqn), owned.tensor is None
            tensor, shapes = torch.empty(0) if owned.tensor is None else owned.tensor, {fqn: tuple(owned.shape)}
            yield owned.group, Stepped(tensor=tensor, names=(fqn,), shapes=shapes, elsewhere=elsewhere)
    else:
        for settings, parameter in ((group, p) for group in optimizer.param_groups for p in group["params"]):
            if (name := names.of(parameter)) is None:
                raise CheckpointError(
                    f"optimizer {index} steps a parameter of shape {tuple(parameter.shape)} that the module does not "
                    "have: make the optimizer from the module's parameters after the module was sharded"
                )
            yield settings, Stepped(tensor=parameter, names=(name,), shapes={name: tuple(parameter.shape)})


def optimizer_states(
    optimizers: Sequence[AnyOptimizer], names: Names
) -> tuple[dict[SlotName, LiveTensor], list[dict[str, Any]]]:
    """Return the state of ``optimizers``: live tensors, or this rank's slices, and the rest per optimizer.

    The rest is plain values: ``{"class": str, "groups": [{"params": [fqn], **hyperparameters}], "slots": {fqn: {slot:
    value}}}``, with scalar tensors as numbers. No communication. CheckpointError: a parameter that the module does not
    have, or a slot of a sharded parameter that is neither a scalar nor of its shape.
    """
    tensors: dict[SlotName, LiveTensor] = {}
    described: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        live = flat.torch_optimizer(optimizer)
        _refuse_inner(live)
        groups = groups_of(index, optimizer, names)
        plain: dict[str, Values] = {}
        for part, fqn, slot, value in _live_slots(optimizer, groups):
            name = SlotName(index, fqn, slot)
            if part.flat is not None and slot == "step" and isinstance(value, int | float):
                # Optimizers of flat tensors count steps in a Python number. torch's own, which read this, keep a scalar
                # of this dtype for each parameter (torch.optim.optimizer._get_scalar_dtype).
                wide = torch.get_default_dtype() == torch.float64
                value = torch.tensor(value, dtype=torch.float64 if wide else torch.float32)
            if part.is_sharded:
                _check_shardable(name, value, part.tensor.shape)
            if isinstance(value, LiveTensor):
                tensors[name] = value
            else:
                plain.setdefault(fqn, {})[slot] = value
        plain_groups = [{"params": group.names, **_plain(hyperparameters(group.settings))} for group in groups]
        described.append({"class": kind_of(live), "groups": plain_groups, "slots": plain})
    return tensors, described


def _live_slots(
    optimizer: AnyOptimizer, groups: Sequence[Group], only: str | None = None
) -> Iterator[tuple[Stepped, str, str, Any]]:
    """Yield stepped tensor, FQN, name and live value of each slot, of one parameter if ``only`` is given."""
    live = flat.torch_optimizer(optimizer)
    for part in (p for group in groups for p in group.stepped if only is None or only in p.shapes):
        state = flat.plain_slots(live.state.get(part.tensor, {}))
        if isinstance(optimizer, OwnedOptimizer):
            (fqn,) = part.names
            for slot, facts in optimizer.slots.get(fqn, {}).items():
                slices = [flat.FlatSlice(data=state[slot].detach().reshape(-1), start=0)] if state else []
                yield part, fqn, slot, flat.FlatTensor(facts.shape, facts.dtype, slices)
            yield from ((part, fqn, slot, value) for slot, value in optimizer.values.get(fqn, {}).items())
            continue
        for slot, value in state.items():
            for fqn in part.shapes if only is None else [only]:
                yield part, fqn, slot, part.view(fqn, value) if isinstance(value, Tensor) else value


def optimizer_slot(optimizers: Sequence[AnyOptimizer], names: Names, fqn: str, slot: str) -> LiveTensor | None:
    """Return a parameter's optimizer state in ``slot`` ("exp_avg"). None if no optimizer has it."""
    for index, optimizer in enumerate(optimizers):
        for _, _, name, value in _live_slots(optimizer, groups_of(index, optimizer, names), only=fqn):
            if name == slot:
                return value if isinstance(value, LiveTensor) else torch.as_tensor(value)
    return None


def _check_shardable(name: SlotName, value: Any, shape: tuple[int, ...]) -> None:
    """CheckpointError: a slot that can't be cut like its sharded parameter, or flat tensor, of ``shape``."""
    if isinstance(value, Tensor):
        if value.shape not in ((), shape):
            raise CheckpointError(unshardable(name, tuple(value.shape), tuple(shape)))
    elif any(isinstance(part, Tensor) for part in parts(value)):
        raise CheckpointError(unshardable(name, f"of a {type(value).__name__} of tensors", tuple(shape)))


def unshardable(name: SlotName, slot: object, parameter: tuple[int, ...]) -> str:
    return (
        f"{name.key} has shape {slot}, its parameter {parameter}: only scalars and tensors of the parameter's shape "
        "can be sharded. Use another optimizer, or replicate (DDP)"
    )


def check_savable(optimizers: Sequence[AnyOptimizer], names: Names) -> None:
    """Step small parameters with a new optimizer of each kind, if one can be made, and check that its state can be
    saved. ConfigurationError: it can't. No communication. Live state and random numbers stay as they are.
    """
    for index, optimizer in enumerate(optimizers):
        live = flat.torch_optimizer(optimizer)
        _refuse_inner(live)
        kinds = {
            (part.is_sharded, len(shape) if part.flat is None else 1)
            for group in groups_of(index, optimizer, names)
            for part in group.stepped
            for shape in part.shapes.values()
        }
        for is_sharded, ndim in sorted(kinds):
            # DeepSpeed's kernels have known state, and a new one allocates.
            own = not type(live).__module__.startswith("deepspeed")
            # The matrix is large enough for optimizers that keep state in blocks.
            shape = (64, 68) if ndim == 2 else tuple(range(2, 2 + ndim))
            state, apart = (own and state_of_small(live, torch.zeros(shape))) or ({}, [])
            if apart:
                warn_on_first_rank(
                    f"{kind_of(live)} keeps {', '.join(apart)} outside of its `state` and parameter groups. Only these "
                    "and plain numbers are saved: a resumed run begins with new ones."
                )
            try:
                for slot, value in flat.plain_slots(state).items():
                    name = SlotName(index, "parameter", slot)
                    if is_sharded:
                        _check_shardable(name, value, shape)
                    if not isinstance(value, Tensor):
                        encode_trainer_state({name.key: value})
            except CheckpointError as error:
                raise ConfigurationError(f"the state of {kind_of(live)} can't be saved: {error}") from error


def _refuse_inner(optimizer: Optimizer) -> None:
    """ConfigurationError: it steps another optimizer whose state is not in its own."""
    held = list(vars(optimizer).values())
    held += [each for value in held if isinstance(value, list | tuple) for each in value]
    held += [each for value in held if isinstance(value, dict) for each in value.values()]
    for other in held:
        if isinstance(other, Optimizer) and other.state is not optimizer.state:
            raise ConfigurationError(
                f"the state of {kind_of(optimizer)} can't be saved: it steps {kind_of(other)}, whose state is not in "
                "its `state`, so that a resumed run would begin with an empty one. Use another optimizer, let the two "
                "share their state, or save nothing (enable_checkpointing: false)."
            )


# Settings of the implementation of a step. Some devices lack them.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}


def state_of_small(optimizer: Optimizer, like: Tensor) -> tuple[Mapping[str, Any], list[str]] | None:
    """Step a new optimizer of this kind on a parameter like ``like``. Returned: its state, and the attributes that the
    step changed but that are not saved. None if no such optimizer can be made.
    """
    small = nn.Parameter(torch.full_like(like, 0.5))

    def closure() -> float:
        small.grad = torch.ones_like(small)
        return float(small.detach().sum())

    known = inspect.signature(type(optimizer)).parameters.keys() - _IMPLEMENTATIONS
    settings = {**vars(optimizer), **optimizer.defaults}
    try:
        with torch.random.fork_rng(devices=[]):
            new = type(optimizer)([small], **{k: v for k, v in settings.items() if k in known})
            closure()
            before = _attributes(new)
            new.step(closure)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    saved = _own_values(new)
    apart = [name for name, value in _attributes(new).items() if value != before.get(name) and name not in saved]
    return new.state.get(small, {}), apart


def _attributes(optimizer: Optimizer) -> dict[str, str]:
    return {
        name: repr(value)
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
        and name not in ("state", "param_groups", "defaults")
        and isinstance(value, (int, float, Tensor, list, tuple, dict))
    }


def own_values(optimizers: Sequence[AnyOptimizer]) -> list[dict[str, Any]]:
    """Plain attributes of each optimizer, besides state and groups. Empty for libraries' own classes."""
    live = [flat.torch_optimizer(optimizer) for optimizer in optimizers]
    return [{} if type(each).__module__.startswith(("torch.", "deepspeed.")) else _own_values(each) for each in live]


def _own_values(optimizer: Optimizer) -> dict[str, Any]:
    own = {name: value for name, value in vars(optimizer).items() if name != "param_groups"}
    return copy.deepcopy({k: v for k, v in own.items() if len(list(parts(v))) <= 64 and _is_plain(v)})


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple):
        return all(map(_is_plain, [*value, *value.values()] if type(value) is dict else value))
    return isinstance(value, bool | int | float | str | np.generic | None)


def kind_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class. For DeepSpeed's kernels, of the class in torch that computes the same."""
    if hasattr(optimizer, "adam_w_mode"):
        return "AdamW" if optimizer.adam_w_mode else "Adam"
    return type(optimizer).__qualname__


def hyperparameters(group: Mapping[str, Any]) -> Values:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(values: Values) -> Values:
    return {
        name: (v.detach().cpu().clone() if v.ndim else v.item()) if isinstance(v, Tensor) else v
        for name, v in values.items()
    }
