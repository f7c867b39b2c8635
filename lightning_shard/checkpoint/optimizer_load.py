"""How saved optimizer state fits live optimizers, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.layout import OPTIMIZER_PREFIX, optimizer_key, torch_dtype
from lightning_shard.checkpoint.manifest import Manifest, TensorEntry
from lightning_shard.checkpoint.optimizer import Values, hyperparameters, uncut
from lightning_shard.checkpoint.optimizer_saved import SavedOptimizer, entries_by_parameter, saved_names
from lightning_shard.checkpoint.stepped import Group, Stepped, groups_of
from lightning_shard.tensors.flat import AnyOptimizer, torch_optimizer
from lightning_shard.tensors.names import Names


@dataclass(frozen=True)
class NewTensor:
    """A slot tensor that is to be read from the checkpoint's files."""

    shape: tuple[int, ...]
    """That of the tensor that the optimizer steps, of a scalar, or neither."""

    dtype: torch.dtype

    is_scalar: bool
    """Whether it is a scalar beside a parameter that may be one too."""


@dataclass(frozen=True, eq=False)
class SlotsPlan:
    """The slots of one stepped tensor."""

    index: int
    """Of the optimizer."""

    optimizer: Optimizer
    part: Stepped
    settings: Mapping[str, Any]
    """The live parameter group."""

    slots: Values
    """A NewTensor where one is to be read."""

    keys: dict[str, dict[str, str]]
    """Slot that is to be read to FQN to key."""


@dataclass(frozen=True)
class OptimizerPlan:
    """How saved optimizer state fits live optimizers; nothing is changed before it is applied."""

    optimizers: list[Optimizer]

    slots: list[SlotsPlan] = field(default_factory=list)
    """Of each stepped tensor with saved state."""

    groups: list[tuple[dict[str, Any], Values]] = field(default_factory=list)
    """Live group and its saved hyperparameters."""

    missing: list[str] = field(default_factory=list)
    """Live parameters that the saved optimizer did not step, as ``optimizer.<i>.<fqn>``, and slots that it did not
    have of some of a flat tensor's parameters, with the slot's name."""

    unexpected: list[str] = field(default_factory=list)
    """Saved keys for which there is no live parameter."""

    problems: list[str] = field(default_factory=list)
    """What can't be loaded even in part."""


def plan_optimizers(
    optimizers: Sequence[AnyOptimizer], names: Names, manifest: Manifest, saved: Sequence[Mapping[str, Any]]
) -> OptimizerPlan:
    """Match live optimizers with saved ones (``saved`` as `optimizer_groups` gave it) by parameter name.

    The order of groups and of parameters in them does not matter. Tied names are followed.
    """
    plan = OptimizerPlan([torch_optimizer(optimizer) for optimizer in optimizers])
    if len(saved) != len(optimizers):
        plan.problems.append(f"{len(saved)} optimizers were saved, here are {len(optimizers)}")
        return plan
    entries = entries_by_parameter(manifest)
    other_names = saved_names(names, manifest)
    for index, (optimizer, described) in enumerate(zip(optimizers, saved, strict=True)):
        homes = {fqn: group for group in described["groups"] for fqn in group["params"]}
        source = SavedOptimizer(index, manifest, entries.get(index, {}), described["slots"], homes, other_names)
        scalars = source.scalars()
        taken: set[str] = set()
        for position, group in enumerate(groups_of(index, optimizer, names)):
            stored = {fqn: source.name_of(fqn) for fqn in group.names}
            found = {fqn: name for fqn, name in stored.items() if name is not None}
            plan.missing.extend(f"{OPTIMIZER_PREFIX}{index}.{fqn}" for fqn, name in stored.items() if name is None)
            taken.update(found.values())
            for part in group.stepped:
                _plan_slots(plan, plan.optimizers[index], part, group, found, source, scalars)
            _plan_group(plan, index, position, group.settings, [homes[name] for name in found.values()])
        plan.unexpected.extend(sorted(f"{OPTIMIZER_PREFIX}{index}.{fqn}" for fqn in set(homes) - taken))
    return plan


def _plan_slots(
    plan: OptimizerPlan,
    optimizer: Optimizer,
    part: Stepped,
    group: Group,
    found: Mapping[str, str],
    source: SavedOptimizer,
    scalars: set[str],
) -> None:
    """Plan the slots of a stepped tensor; ``found``: FQN to the name that its state is stored under."""
    entries: dict[str, dict[str, TensorEntry]] = {}
    values: dict[str, Values] = {}
    for fqn in part.names:
        stored = found.get(fqn)
        tensors = source.entries.get(stored, {}) if stored is not None else {}
        if fqn not in part.shapes:  # frozen here
            plan.unexpected.extend(optimizer_key(source.index, fqn, slot) for slot in tensors)
            continue
        for slot, entry in tensors.items():
            if part.is_cut and entry.shape not in ((), part.shapes[fqn]):
                key = optimizer_key(source.index, fqn, slot)
                plan.problems.append(uncut(key, entry.shape, part.shapes[fqn]))
            else:
                entries.setdefault(slot, {})[fqn] = entry
        for slot, value in source.values.get(stored, {}).items() if stored is not None else ():
            values.setdefault(slot, {})[fqn] = value
    slots: Values = {}
    for slot, by_name in values.items():
        slots[slot] = next(iter(by_name.values()))
        _check_shared(plan, source.index, slot, by_name)
    for slot, held in entries.items():
        slots[slot] = _new_tensor(part, slot, held, found, source, scalars)
    for slot in slots:
        lacking = (part.shapes.keys() & found.keys()) - entries.get(slot, values.get(slot, {})).keys()
        plan.missing.extend(sorted(optimizer_key(source.index, fqn, slot) for fqn in lacking))
    if slots:
        keys = {slot: {fqn: optimizer_key(source.index, fqn, slot) for fqn in held} for slot, held in entries.items()}
        plan.slots.append(SlotsPlan(source.index, optimizer, part, group.settings, slots, keys))


def _new_tensor(
    part: Stepped,
    slot: str,
    held: Mapping[str, TensorEntry],
    found: Mapping[str, str],
    source: SavedOptimizer,
    scalars: set[str],
) -> NewTensor:
    dtypes = []
    for fqn, entry in held.items():
        weights = source.weights(found[fqn])
        # State that had its parameter's dtype follows the parameter to the dtype that it has here.
        follows = weights is not None and weights.dtype == entry.dtype and entry.shape == part.shapes[fqn]
        dtypes.append(part.tensor.dtype if follows else torch_dtype(entry.dtype))
    is_scalar = all(entry.shape == () for entry in held.values()) and (
        slot == "step" or slot in scalars or any(part.shapes[fqn] != () for fqn in held)
    )
    shape = next(iter(held.values())).shape
    if part.flat is not None:
        shape = () if is_scalar else tuple(part.tensor.shape)
    # One flat tensor has one dtype: the one that holds what all its parameters had.
    return NewTensor(shape, reduce(torch.promote_types, dtypes), is_scalar)


def _check_shared(plan: OptimizerPlan, index: int, slot: str, by_name: Mapping[str, Any]) -> None:
    """What a flat tensor has once must be equal for all of its parameters."""
    problem = unequal(index, slot, by_name)
    if problem is not None:
        plan.problems.append(problem)


def unequal(index: int, slot: str, by_name: Mapping[str, Any]) -> str | None:
    """What is wrong where the parameters of one flat tensor have different values of a slot that it has once."""
    first, *others = by_name.items()
    for fqn, value in others:
        if not _equal(first[1], value):
            return (
                f"{slot} of optimizer {index} is {_shown(first[1])} for {first[0]} and {_shown(value)} for {fqn}, but "
                f"they are in one flat tensor here, and ZeRO keeps one {slot} per flat group: give them parameter "
                "groups of their own, or load with DDP or FSDP"
            )
    return None


def _plan_group(plan: OptimizerPlan, index: int, position: int, group: dict[str, Any], sources: list[Values]) -> None:
    values: list[Values] = []
    seen: set[int] = set()
    for source in sources:
        if id(source) not in seen:
            seen.add(id(source))
            values.append(hyperparameters(source))
    for other in values[1:]:
        differing = [k for k in values[0].keys() | other.keys() if not _equal(values[0].get(k), other.get(k))]
        if differing:
            plan.problems.append(
                f"group {position} of optimizer {index} joins parameters that were saved in groups with different "
                f"{', '.join(sorted(differing))}"
            )
            return
    if values:
        plan.groups.append((group, values[0]))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _shown(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
