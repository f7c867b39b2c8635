"""Loading optimizer state: match saved state with live optimizers by parameter name, then carry the plan out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.checkpoint import optimizer_state
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.manifest import Manifest, TensorEntry
from lightning_shard.checkpoint.matching import Match, further_names, other_kind
from lightning_shard.checkpoint.optimizer_state import Group, Stepped, Values
from lightning_shard.errors import CheckpointMismatchError
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor, has_tensors_inside, plain_slots, torch_optimizer
from lightning_shard.tensors.names import Names
from lightning_shard.text import listed


@dataclass(frozen=True)
class NewTensor:
    """A slot tensor to read from the checkpoint's files."""

    keys: Mapping[str, str]  # FQN to the key that its part is stored under
    shape: tuple[int, ...]  # equal to the stepped tensor's, (), or another
    dtype: torch.dtype
    is_scalar: bool  # a scalar by meaning, also if its parameter has no dims either
    is_shared: bool  # a scalar that a flat tensor has once for all of its parameters


@dataclass(frozen=True, eq=False)
class SlotsPlan:
    index: int  # the optimizer's number
    part: Stepped
    settings: Mapping[str, Any]  # the live parameter group
    values: Values  # slots that are no tensors
    tensors: Mapping[str, NewTensor]


@dataclass(frozen=True)
class OptimizerPlan:
    """The assignment of saved optimizer state to live optimizers. Making it changes nothing."""

    optimizers: list[Optimizer]
    configured: bool = False  # True if live hyperparameters win where the checkpoint has other values
    slots: list[SlotsPlan] = field(default_factory=list)  # one for each stepped tensor with saved state
    groups: list[tuple[dict[str, Any], Values]] = field(default_factory=list)  # live group, its new hyperparameters
    overridden: list[str] = field(default_factory=list)  # hyperparameters that differ, with the winning value


@dataclass(frozen=True)
class _Saved:
    index: int
    manifest: Manifest
    keys: Mapping[str, Mapping[str, str]]  # stored FQN to slot to key, of slots that are tensors
    values: Mapping[str, Values]  # stored FQN to slots that are no tensors
    groups: Mapping[str, Values]  # stored FQN to its group
    further: Mapping[str, list[str]]  # live FQN to its other names
    homes: Mapping[str, str]  # name by which weights are searched, to the key that has them
    match: Match  # collects mismatches

    def name_of(self, fqn: str) -> str | None:
        """Return the stored FQN of a live parameter's state. None if the saved optimizer did not step it."""
        known = [fqn, *self.further.get(fqn, ())]
        homes = [self.homes[name].removeprefix(layout.MODEL_PREFIX) for name in known if name in self.homes]
        return next((name for name in homes + known if name in self.groups), None)

    def weights(self, stored: str) -> TensorEntry | None:
        key = layout.MODEL_PREFIX + stored
        return self.manifest.tensors.get(self.manifest.aliases.get(key, key))

    @cached_property
    def scalars(self) -> set[str]:
        """Names of slots that are scalars for at least one parameter with dims."""
        found = set()
        for stored, slots in self.keys.items():
            weights = self.weights(stored)
            if weights is not None and weights.shape != ():
                found |= {slot for slot, key in slots.items() if self.manifest.tensors[key].shape == ()}
        return found


def plan_optimizers(
    optimizers: Sequence[AnyOptimizer],
    names: Names,
    manifest: Manifest,
    saved: Sequence[Mapping[str, Any]],
    match: Match,
    *,
    homes: Mapping[str, str],
    configured: bool = False,
) -> OptimizerPlan:
    """Match saved optimizers (``saved`` as of `optimizer_states`) with live ones by parameter name.

    Tied names and ``homes`` are followed. Groups and parameters may come in any order. ``match`` collects live
    parameters that the saved optimizer did not step (``optimizer.<i>.<fqn>``), slots missing for some of a flat
    tensor's parameters, saved keys without a live parameter, and state that can't be loaded.
    """
    plan = OptimizerPlan([torch_optimizer(optimizer) for optimizer in optimizers], configured)
    if len(saved) != len(optimizers):
        match.problems.append(f"{len(saved)} optimizers were saved, here are {len(optimizers)}")
        return plan
    keys: dict[int, dict[str, dict[str, str]]] = {}
    for key, name in manifest.slots.items():
        keys.setdefault(name.optimizer, {}).setdefault(name.fqn, {})[name.slot] = key
    further = further_names(names.aliases)
    for index, (optimizer, described) in enumerate(zip(optimizers, saved, strict=True)):
        by_name = {fqn: group for group in described["groups"] for fqn in group["params"]}
        source = _Saved(index, manifest, keys.get(index, {}), described["slots"], by_name, further, homes, match)
        live = optimizer_state.groups_of(index, optimizer, names)
        if (problem := other_kind(plan.optimizers[index], live, described)) is not None:
            match.problems.append(f"optimizer {index} {problem}")
        else:
            taken = _plan_groups(plan, live, source)
            match.unexpected.extend(sorted(f"{layout.OPTIMIZER_PREFIX}{index}.{fqn}" for fqn in set(by_name) - taken))
    return plan


def _plan_groups(plan: OptimizerPlan, live: Sequence[Group], source: _Saved) -> set[str]:
    """Plan the groups of an optimizer. Returned: the names of the saved parameters that are used."""
    taken: set[str] = set()
    used: set[int] = set()  # ids of saved groups
    for position, group in enumerate(live):
        stored = {fqn: source.name_of(fqn) for fqn in group.names}
        found = {fqn: name for fqn, name in stored.items() if name is not None}
        source.match.missing.extend(f"{layout.OPTIMIZER_PREFIX}{source.index}.{n}" for n in stored if n not in found)
        taken.update(found.values())
        for part in group.stepped:
            _plan_slots(plan, part, group, found, source)
        sources = {id(source.groups[name]): source.groups[name] for name in found.values()}
        if len(sources) > 1 or used & sources.keys():
            saved = "several groups" if len(sources) > 1 else "a group that is several here"
            source.match.problems.append(
                f"group {position} of optimizer {source.index} has parameters of {saved}, as they were saved: give the "
                "groups that were saved, or start from the weights alone (load_from_checkpoint)"
            )
        for saved_group in sources.values():
            _plan_group(plan, position, group.settings, saved_group, source)
        used |= sources.keys()
    return taken


def _plan_slots(plan: OptimizerPlan, part: Stepped, group: Group, found: Mapping[str, str], source: _Saved) -> None:
    """Plan the slots of a stepped tensor. ``found``: FQN to the stored name of its state."""
    if part.elsewhere:
        return
    keys: dict[str, dict[str, str]] = {}
    values: dict[str, Values] = {}
    unfit: set[str] = set()  # FQNs that are reported already
    for fqn in part.names:
        if (stored := found.get(fqn)) is None:
            continue
        tensors = source.keys.get(stored, {})
        if fqn not in part.shapes:  # frozen here
            source.match.unexpected.extend(layout.SlotName(source.index, fqn, slot).key for slot in tensors)
            continue
        # If a parameter's shape differs, report only that.
        reshaped = any(text.startswith(f"{layout.MODEL_PREFIX}{fqn} ") for text in source.match.reshaped)
        weights, live = source.weights(stored), part.shapes[fqn]
        shapes = {slot: source.manifest.tensors[key].shape for slot, key in tensors.items()}
        if weights is not None and weights.shape != live and any(shape != () for shape in shapes.values()):
            if not reshaped:
                source.match.problems.append(
                    f"the state that optimizer {source.index} has of {fqn} is of a parameter of shape {weights.shape}, "
                    f"which is {live} here: give it the shape that was saved, or start with new optimizers by "
                    "checkpoint['optimizer_states'] = [] in on_load_checkpoint"
                )
            unfit.add(fqn)
            continue
        for slot, key in tensors.items():
            if part.is_sharded and shapes[slot] not in ((), live) and not reshaped:
                name = layout.SlotName(source.index, fqn, slot)
                source.match.problems.append(optimizer_state.unshardable(name, shapes[slot], live))
            else:
                keys.setdefault(slot, {})[fqn] = key
        for slot, value in source.values.get(stored, {}).items():
            values.setdefault(slot, {})[fqn] = value
    source.match.problems.extend(p for slot, by_name in values.items() for p in _unequal(source.index, slot, by_name))
    plain = {slot: next(iter(by_name.values())) for slot, by_name in values.items() if slot not in keys}
    new = {slot: _new_slot(part, slot, own, found, source) for slot, own in keys.items()}
    if part.flat is not None:
        # Other engines have no state of a parameter that no step used. A flat tensor has zeros and the group's step.
        kept = source.keys.keys() | source.values.keys()
        unfit |= {fqn for fqn in part.shapes.keys() & found.keys() if found[fqn] not in kept}
    for slot in values | keys:
        having = keys.get(slot, values.get(slot, {})).keys()
        lacking = (part.shapes.keys() & found.keys()) - having - unfit
        source.match.missing.extend(sorted(layout.SlotName(source.index, fqn, slot).key for fqn in lacking))
        without = sorted(part.shapes.keys() - having - unfit)
        if without and part.flat is not None and (slot in plain or new[slot].is_shared):
            found_for = f"saved for {min(having)} and not for {listed(sorted(without), most=3)}"
            source.match.problems.append(_in_one_tensor(source.index, slot, found_for))
    if plain or new:
        plan.slots.append(SlotsPlan(source.index, part, group.settings, plain, new))


def _new_slot(part: Stepped, slot: str, keys: Mapping[str, str], found: Mapping[str, str], source: _Saved) -> NewTensor:
    dtypes = []
    entries = {fqn: source.manifest.tensors[key] for fqn, key in keys.items()}
    for fqn, entry in entries.items():
        weights = source.weights(found[fqn])
        # A slot of its parameter's dtype follows the parameter to its dtype here.
        follows = weights is not None and weights.dtype == entry.dtype and entry.shape == part.shapes[fqn]
        dtypes.append(part.tensor.dtype if follows else entry.dtype)
    is_scalar = all(entry.shape == () for entry in entries.values()) and (
        slot == "step" or slot in source.scalars or any(part.shapes[fqn] != () for fqn in entries)
    )
    shape = next(iter(entries.values())).shape
    if part.flat is not None:
        shape = () if is_scalar else tuple(part.tensor.shape)
    # A flat tensor has one dtype, which holds the values of all its parameters.
    dtype = reduce(torch.promote_types, dtypes)
    return NewTensor(keys, shape, dtype, is_scalar, is_shared=is_scalar and part.flat is not None)


def _unequal(index: int, slot: str, by_name: Mapping[str, Any]) -> list[str]:
    """Report different values, among the parameters of a flat tensor, of a slot that it has once."""
    (name, first), *others = by_name.items()
    found = next(((fqn, value) for fqn, value in others if not _equal(first, value)), None)
    shown = found and f"{_shown(first)} for {name} and {_shown(found[1])} for {found[0]}"
    return [_in_one_tensor(index, slot, shown)] if shown else []


def _in_one_tensor(index: int, slot: str, found: str) -> str:
    return (
        f"{slot} of optimizer {index} is {found}, but they are in one flat tensor here, and ZeRO keeps one {slot} per "
        "flat group: give them parameter groups of their own, or load with DDP or FSDP"
    )


_UNCOMPARED = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "step"}
"""Hyperparameters that change no numbers, or that are state of schedulers or optimizers."""


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the hyperparameters with different values. One that a scheduler changes is compared by its first value."""
    compared = (one.keys() & other.keys()) - _UNCOMPARED - {"params", "param_names"}
    began = {"lr": "initial_lr"} if "initial_lr" in one and "initial_lr" in other else {}
    if "base_momentum" in one or "base_momentum" in other:
        compared -= {"momentum", "betas"}
    if "swa_lr" in one or "swa_lr" in other:  # torch's SWALR has replaced the schedule
        compared -= {"lr"}
    return sorted(k for k in compared if not _equal(one[began.get(k, k)], other[began.get(k, k)]))


def _plan_group(plan: OptimizerPlan, number: int, group: dict[str, Any], described: Values, source: _Saved) -> None:
    saved = optimizer_state.hyperparameters(described)
    differing = _differing(group, saved)
    kept = {name: group[name] for name in differing}
    if "lr" in kept and saved.get("initial_lr"):
        # The schedule goes on at its saved position, scaled from the configured first rate.
        kept["initial_lr"] = group["initial_lr"] if "initial_lr" in group else group["lr"]
        kept["lr"] = kept["initial_lr"] * (saved["lr"] / saved["initial_lr"])
    winner, other = ({**saved, **kept}, saved) if plan.configured else (saved, group)
    plan.groups.append((group, winner))
    plan.overridden.extend(
        f"{name} of group {number} of optimizer {source.index} is {_shown(winner[name])}, not {_shown(other[name])}"
        for name in differing
    )


def _equal(one: Any, other: Any) -> bool:
    one, other = _shown(one), _shown(other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _shown(value: Any) -> Any:
    """Return a scalar tensor as a number, and a list (JSON's form of a tuple) as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def read_scalars(plan: OptimizerPlan, read: Callable[[Mapping[str, Tensor]], object]) -> dict[str, Tensor]:
    """Return by key the scalars that flat tensors have once, filled by ``read``. CheckpointMismatchError: they differ
    among the parameters of one flat tensor.
    """
    shared = [(slots.index, slot, new) for slots in plan.slots for slot, new in slots.tensors.items() if new.is_shared]
    scalars = {key: torch.zeros((), dtype=new.dtype) for _, _, new in shared for key in new.keys.values()}
    read(scalars)
    problems = [_unequal(i, slot, {fqn: scalars[key] for fqn, key in new.keys.items()}) for i, slot, new in shared]
    if found := [problem for each in problems for problem in each]:
        raise CheckpointMismatchError("\n  ".join(["the optimizer's state does not fit:", *found[:20]]))
    return scalars


def create_slots(plan: OptimizerPlan, scalars: Mapping[str, Tensor]) -> list[tuple[str, LiveTensor]]:
    """Give the optimizers exactly the saved slots. Live ones that fit are kept. Returned: the slots to fill by key."""
    planned = {id(slots.part.tensor) for slots in plan.slots}
    for optimizer in plan.optimizers:
        for tensor in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in planned]:
            del optimizer.state[tensor]
    wanted: list[tuple[str, LiveTensor]] = []
    for slots in plan.slots:
        part, optimizer = slots.part, plan.optimizers[slots.index]
        live = _live_state(optimizer, slots)
        plain = plain_slots(live)
        state = {k: v if part.flat is None else _like_live(plain.get(k), v) for k, v in slots.values.items()}
        for slot, new in slots.tensors.items():
            value = scalars[next(iter(new.keys.values()))] if new.is_shared else None
            if value is not None and _is_number(plain.get(slot)):
                state[slot] = _like_live(plain[slot], value.item())
                continue
            state[slot] = _tensor(slots, slot, plain.get(slot), new)
            if value is not None:
                state[slot].detach().copy_(value)
            else:
                wanted.extend((key, part.view(fqn, state[slot])) for fqn, key in new.keys.items())
        for name, value in live.items():
            if has_tensors_inside(value):  # a tensor subclass, rebuilt from its plain tensors
                inside, settings = value.__tensor_flatten__()
                plain = {each: state.pop(f"{name}.{each}") for each in inside}
                state[name] = type(value).__tensor_unflatten__(plain, settings, value.size(), value.stride())
        optimizer.state[part.tensor] = state
    return wanted


def _live_state(optimizer: Optimizer, slots: SlotsPlan) -> Mapping[str, Any]:
    """Return the live state, or the state after a first step if saved tensors belong inside tensor subclasses."""
    part = slots.part
    live: Mapping[str, Any] = optimizer.state.get(part.tensor, {})
    if live or part.flat is not None or not any("." in slot for slot in {**slots.values, **slots.tensors}):
        return live
    (shape,) = part.shapes.values()
    found = optimizer_state.state_of_small(optimizer, part.tensor.detach().new_zeros(shape))
    return {} if found is None else found[0]


def load_groups(plan: OptimizerPlan) -> None:
    """Give the live groups their hyperparameters. A live tensor takes the value in place."""
    for group, values in plan.groups:
        for name, value in values.items():
            live = group.get(name)
            if isinstance(live, Tensor):
                with torch.no_grad():
                    live.copy_(torch.as_tensor(value, dtype=live.dtype))
            else:
                group[name] = value


def _like_live(live: Any, value: Any) -> Any:
    """Return a saved number in the live form: a number, or a scalar tensor, as optimizers of flat tensors keep it."""
    if not _is_number(value):
        return value
    if isinstance(live, Tensor) and live.ndim == 0:
        return torch.full_like(live, value)
    return type(live)(value) if _is_number(live) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tensor(slots: SlotsPlan, slot: str, live: Any, wanted: NewTensor) -> Tensor:
    stepped = slots.part.tensor
    has_its_shape = wanted.shape == tuple(stepped.shape) and not wanted.is_scalar
    if (
        isinstance(live, Tensor)
        and tuple(live.shape) == wanted.shape
        and live.dtype == wanted.dtype
        and isinstance(live, DTensor) == (has_its_shape and isinstance(stepped, DTensor))
    ):
        # Padding stays zero, and parameters without saved state start from zero.
        if slots.part.flat is not None:
            live.detach().zero_()
        return live
    if has_its_shape and slots.part.new_slot is not None:
        return slots.part.new_slot(slot)
    if has_its_shape:
        return torch.zeros_like(stepped.detach(), dtype=wanted.dtype, memory_format=torch.preserve_format)
    # As torch.optim on load: a step count stays on the host unless a fused or captured step reads it.
    on_host = slot == "step" and not (slots.settings.get("capturable") or slots.settings.get("fused"))
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device="cpu" if on_host else stepped.device)
