"""What optimizers step, as checkpoints see it: whole parameters of a module, or flat tensors with parts of several.

A checkpoint knows optimizer state by parameter name. A torch optimizer over a module's parameters (plain, or
DTensors) says which those are itself; of an optimizer over flat tensors its owner says it with a `FlatOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.errors import CheckpointError
from lightning_shard.tensors.flat import AnyOptimizer, FlatMember, FlatOptimizer, FlatSlice, FlatTensor, LiveTensor
from lightning_shard.tensors.names import Names


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepped:
    """A tensor that an optimizer steps and keys its state by, with the parameters in it."""

    tensor: Tensor

    names: tuple[str, ...]
    """FQNs of the parameters, frozen ones in the group too."""

    shapes: Mapping[str, tuple[int, ...]]
    """FQN to whole shape, of those that can have state."""

    flat: Mapping[str, FlatMember] | None
    """FQN to its part; None where the tensor is a parameter of the module, whole or a DTensor."""

    new_slot: Callable[[str], Tensor] | None = None
    """As `FlatGroup.new_slot`."""

    @property
    def is_cut(self) -> bool:
        """Whether other ranks may hold other parts, so that a slot must be a scalar or of the parameter's shape."""
        return self.flat is not None or isinstance(self.tensor, DTensor)

    def stored_shape(self, fqn: str, slot: Tensor) -> tuple[int, ...] | None:
        """Shape of what a checkpoint stores of a slot tensor for one parameter; None where it can't be cut."""
        shape = tuple(slot.shape)
        if self.flat is not None and shape == tuple(self.tensor.shape):
            return self.shapes[fqn]
        allowed = [()] if self.flat is not None else [(), self.shapes[fqn]]
        return shape if shape in allowed or not self.is_cut else None

    def view(self, fqn: str, slot: Tensor) -> LiveTensor:
        """The part of a slot tensor that belongs to one parameter, in place; a scalar belongs to each."""
        if self.flat is None or slot.ndim == 0:
            return slot
        member = self.flat[fqn]
        data = slot.detach()[member.offset : member.offset + member.length]
        return FlatTensor(member.shape, slot.dtype, [FlatSlice(data, member.start)])


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """A parameter group and what the optimizer steps for it."""

    settings: dict[str, Any]
    """The live parameter group with the hyperparameters."""

    stepped: list[Stepped]

    @property
    def names(self) -> list[str]:
        """FQNs of the group's parameters, in the group's order."""
        return [fqn for part in self.stepped for fqn in part.names]


def groups_of(index: int, optimizer: AnyOptimizer, names: Names) -> list[Group]:
    """The parameter groups of the optimizer number ``index``; the same on every rank but for the tensors' parts.

    Raises CheckpointError for a parameter that the module does not have.
    """
    if isinstance(optimizer, FlatOptimizer):
        return _flat_groups(index, optimizer, names)
    return [
        Group(
            settings=group,
            stepped=[
                _whole(parameter_name(index, position, place, parameter, names), parameter)
                for place, parameter in enumerate(group["params"])
            ],
        )
        for position, group in enumerate(optimizer.param_groups)
    ]


def _whole(fqn: str, parameter: Tensor) -> Stepped:
    return Stepped(tensor=parameter, names=(fqn,), shapes={fqn: tuple(parameter.shape)}, flat=None)


def _flat_groups(index: int, optimizer: FlatOptimizer, names: Names) -> list[Group]:
    groups: dict[int, Group] = {}
    for flat_group in optimizer.groups:
        group = groups.setdefault(id(flat_group.group), Group(settings=flat_group.group, stepped=[]))
        members: dict[str, FlatMember] = {}
        for member in flat_group.members:
            fqn = names.aliases.get(member.fqn, member.fqn)
            if fqn not in names.tensors:
                raise CheckpointError(
                    f"optimizer {index} steps a part of {member.fqn}, but the module has no parameter of that name: "
                    "name the parameters as the unwrapped module does"
                )
            members[fqn] = member
        stepped = {fqn: member for fqn, member in members.items() if member.stepped}
        group.stepped.append(
            Stepped(
                tensor=flat_group.flat,
                names=tuple(members),
                shapes={fqn: tuple(member.shape) for fqn, member in stepped.items()},
                flat=stepped,
                new_slot=flat_group.new_slot,
            )
        )
    return list(groups.values())


def parameter_name(index: int, position: int, place: int, parameter: Tensor, names: Names) -> str:
    """FQN of a parameter of a torch optimizer; CheckpointError if the module does not have it."""
    fqn = names.of(parameter)
    if fqn is None:
        raise CheckpointError(
            f"optimizer {index} steps a parameter of shape {tuple(parameter.shape)} (group {position}, position "
            f"{place}) that the module does not have: make the optimizer from the module's parameters after the "
            "module was sharded"
        )
    return fqn
