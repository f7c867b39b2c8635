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
from lightning_shard.checkpoint.matching import Match, further_names
from lightning_shard.checkpoint.optimizer_state import Group, Stepped, Values
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor, has_tensors_inside, plain_slots, torch_optimizer
from lightning_shard.tensors.names import Names


@dataclass(frozen=True)
class NewTensor:
    """A slot tensor to read from the checkpoint's files."""

    keys: Mapping[str, str]  # FQN to the key that its part is stored under
    shape: tuple[int, ...]  # equal to the stepped tensor's, (), or another
    dtype: torch.dtype
    is_scalar: bool  # a scalar by meaning, also if its parameter has no dims either


@dataclass(frozen=True, eq=False)
class NewState:
    """The saved state of a stepped tensor."""

    index: int  # the optimizer's number
    part: Stepped
    settings: Mapping[str, Any]  # the live parameter group
    values: Values  # slots that are no tensors
    tensors: Mapping[str, NewTensor]

    @property
    def shared(self) -> dict[str, NewTensor]:
        """The scalars that a flat tensor has once for all of its parameters."""
        return {slot: new for slot, new in self.tensors.items() if new.is_scalar and self.part.flat is not None}


@dataclass(frozen=True)
class OptimizerPlan:
    """The assignment of saved optimizer state to live optimizers. Making it changes nothing."""

    optimizers: list[Optimizer]
    states: list[NewState] = field(default_factory=list)  # one for each stepped tensor with saved state
    groups: list[tuple[dict[str, Any], Values]] = field(default_factory=list)  # live group, its new hyperparameters
    overridden: list[str] = field(default_factory=list)  # hyperparameters that differ, with the winning value
    scalars: dict[str, Tensor] = field(default_factory=dict)  # key to value, of `NewState.shared`


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
        tensors = self.manifest.tensors
        with_dims = (slots for stored, slots in self.keys.items() if (w := self.weights(stored)) and w.shape != ())
        return {"step"} | {slot for slots in with_dims for slot, key in slots.items() if tensors[key].shape == ()}


def plan_optimizers(
    optimizers: Sequence[AnyOptimizer],
    names: Names,
    manifest: Manifest,
    saved: Sequence[Mapping[str, Any]],
    match: Match,
    read: Callable[[Mapping[str, Tensor]], object],
    *,
    homes: Mapping[str, str],
    configured: bool = False,
) -> OptimizerPlan:
    """Match saved optimizers (``saved`` as of `optimizer_states`) with live ones by parameter name.

    Tied names and ``homes`` are followed. Groups and parameters may come in any order. ``match`` collects live
    parameters that the saved optimizer did not step (``optimizer.<i>.<fqn>``), slots missing for some of a flat
    tensor's parameters, saved keys without a live parameter, and state that can't be loaded. ``read`` fills tensors by
    key. ``configured``: live hyperparameters win where the checkpoint has other values.
    """
    plan = OptimizerPlan([torch_optimizer(optimizer) for optimizer in optimizers])
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
        if (other := _other_kind(plan.optimizers[index], live, described)) is not None:
            match.problems.append(
                f"optimizer {index} was {other} and is {optimizer_state.kind_of(plan.optimizers[index])} here: build "
                "the optimizer that was saved, or start from the weights alone (load_from_checkpoint)"
            )
        else:
            _plan_groups(plan, live, source, configured=configured)
    shared = [(state.index, slot, new) for state in plan.states for slot, new in state.shared.items()]
    plan.scalars.update({key: torch.zeros((), dtype=new.dtype) for *_, new in shared for key in new.keys.values()})
    read(plan.scalars)
    for index, slot, new in shared:
        match.problems.extend(_unequal(index, slot, {fqn: plan.scalars[key] for fqn, key in new.keys.items()}))
    return plan


_RULES = {"betas", "momentum", "alpha", "rho", "lambd", "etas", "step_sizes"}
"""Hyperparameters that tell kinds of optimizers apart."""


def _other_kind(optimizer: Optimizer, live: Sequence[Group], described: Mapping[str, Any]) -> str | None:
    """Return the kind of the saved optimizer if it is another than the live one's. None if no difference shows."""
    saved = described["class"].rpartition(".")[2][:100]
    if saved == "unknown":  # another library's checkpoint
        groups = (described["groups"], [group.settings for group in live])
        then, now = (sorted({rule for group in part for rule in _RULES & group.keys()}) for part in groups)
        return None if then == now or not described["groups"] else f"one with {', '.join(then) or 'other settings'}"
    mro = type(optimizer).__mro__
    # A user's class may replace the class of torch that it derives from.
    torchs = next(n for n, cls in enumerate(mro) if cls.__module__.startswith("torch.optim"))
    known = {optimizer_state.kind_of(optimizer), *(cls.__name__ for cls in mro[: torchs + 1])}
    return None if saved in known else saved


def _plan_groups(plan: OptimizerPlan, live: Sequence[Group], source: _Saved, *, configured: bool) -> None:
    prefix = f"{layout.OPTIMIZER_PREFIX}{source.index}."
    taken: set[str] = set()  # names of saved parameters
    used: set[int] = set()  # ids of saved groups
    for position, group in enumerate(live):
        found = {fqn: stored for fqn in group.names if (stored := source.name_of(fqn)) is not None}
        source.match.missing.extend(prefix + fqn for fqn in group.names if fqn not in found)
        taken.update(found.values())
        for part in group.stepped:
            if not part.elsewhere:
                _plan_state(plan, part, group, found, source)
        saved = {id(source.groups[name]): source.groups[name] for name in found.values()}
        if len(saved) > 1 or used & saved.keys():
            source.match.problems.append(
                f"group {position} of optimizer {source.index} has parameters that were grouped in another way when "
                "they were saved: give the groups that were saved, or start from the weights alone "
                "(load_from_checkpoint)"
            )
        for each in saved.values():
            _plan_group(plan, f"group {position} of optimizer {source.index}", group.settings, each, configured)
        used |= saved.keys()
    source.match.unexpected.extend(sorted(prefix + fqn for fqn in source.groups.keys() - taken))


def _plan_state(plan: OptimizerPlan, part: Stepped, group: Group, found: Mapping[str, str], source: _Saved) -> None:
    """Plan the slots of a stepped tensor. ``found``: FQN to the stored name of its state."""
    match, keys, values = source.match, dict[str, dict[str, str]](), dict[str, Values]()
    having_all: set[str] = set()  # FQNs whose lack of a slot is no mismatch
    for fqn in (name for name in part.names if name in found):
        tensors, plain = source.keys.get(found[fqn], {}), source.values.get(found[fqn], {})
        if fqn not in part.shapes:  # frozen here
            match.unexpected.extend(layout.SlotName(source.index, fqn, slot).key for slot in tensors)
            continue
        weights, live = source.weights(found[fqn]), part.shapes[fqn]
        shapes = {slot: shape for slot, key in tensors.items() if (shape := source.manifest.tensors[key].shape) != ()}
        was_reshaped = weights is not None and weights.shape != live
        if unfit := [slot for slot, shape in shapes.items() if was_reshaped or (part.is_sharded and shape != live)]:
            having_all.add(fqn)
            if layout.MODEL_PREFIX + fqn not in match.reshaped:  # which is the report then
                name = layout.SlotName(source.index, fqn, unfit[0])
                match.problems.append(
                    f"{optimizer_state.unshardable(name, shapes[unfit[0]], live)}. To start with new optimizers, set "
                    "checkpoint['optimizer_states'] = [] in on_load_checkpoint"
                )
            continue
        # Other engines have no state of a parameter that no step used. A flat tensor has zeros and the group's step.
        if part.flat is not None and not tensors and not plain:
            having_all.add(fqn)
        for slot, key in tensors.items():
            keys.setdefault(slot, {})[fqn] = key
        for slot, value in plain.items():
            values.setdefault(slot, {})[fqn] = value
    for slot in values | keys:
        lacking = (part.shapes.keys() & found.keys()) - having_all - (keys.get(slot) or values[slot]).keys()
        match.missing.extend(sorted(layout.SlotName(source.index, fqn, slot).key for fqn in lacking))
    for slot, by_name in values.items():
        match.problems.extend(_unequal(source.index, slot, by_name))
    plain = {slot: next(iter(by_name.values())) for slot, by_name in values.items() if slot not in keys}
    new = {slot: _new_tensor(part, slot, own, found, source) for slot, own in keys.items()}
    if plain or new:
        plan.states.append(NewState(source.index, part, group.settings, plain, new))


def _new_tensor(
    part: Stepped, slot: str, keys: Mapping[str, str], found: Mapping[str, str], source: _Saved
) -> NewTensor:
    dtypes = []
    entries = {fqn: source.manifest.tensors[key] for fqn, key in keys.items()}
    for fqn, entry in entries.items():
        weights = source.weights(found[fqn])
        # A slot of its parameter's dtype follows the parameter to its dtype here.
        follows = weights is not None and weights.dtype == entry.dtype and entry.shape == part.shapes[fqn]
        dtypes.append(part.tensor.dtype if follows else entry.dtype)
    shape = next(iter(entries.values())).shape
    has_dims = any(part.shapes[fqn] != () for fqn in entries)
    is_scalar = all(entry.shape == () for entry in entries.values()) and (slot in source.scalars or has_dims)
    if part.flat is not None:
        shape = () if is_scalar else tuple(part.tensor.shape)
    # A flat tensor has one dtype, which holds the values of all its parameters.
    return NewTensor(keys, shape, reduce(torch.promote_types, dtypes), is_scalar)


def _unequal(index: int, slot: str, by_name: Mapping[str, Any]) -> list[str]:
    """Report different values, among the parameters of a flat tensor, of a slot that it has once."""
    (name, first), *others = by_name.items()
    return [
        f"{slot} of optimizer {index} is {_plain(first)} for {name} and {_plain(value)} for {fqn}, but ZeRO keeps one "
        f"{slot} per flat group: give them parameter groups of their own, or load with DDP or FSDP"
        for fqn, value in others
        if not _equal(first, value)
    ][:1]


_UNCOMPARED = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "step", "params", "param_names"}
"""Entries of groups that change no numbers, or that are state of schedulers or optimizers."""


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the hyperparameters with different values. One that a scheduler changes is compared by its first value."""
    compared = (one.keys() & other.keys()) - _UNCOMPARED
    began = {"lr": "initial_lr"} if "initial_lr" in one and "initial_lr" in other else {}
    if "base_momentum" in one or "base_momentum" in other:
        compared -= {"momentum", "betas"}
    if "swa_lr" in one or "swa_lr" in other:  # torch's SWALR has replaced the schedule
        compared -= {"lr"}
    return sorted(k for k in compared if not _equal(one[began.get(k, k)], other[began.get(k, k)]))


def _plan_group(plan: OptimizerPlan, name: str, group: dict[str, Any], described: Values, configured: bool) -> None:
    saved = optimizer_state.hyperparameters(described)
    differing = _differing(group, saved)
    kept = {each: group[each] for each in differing}
    if "lr" in kept and saved.get("initial_lr"):
        # The schedule goes on at its saved position, scaled from the configured first rate.
        kept["initial_lr"] = group.get("initial_lr", group["lr"])
        kept["lr"] = kept["initial_lr"] * (saved["lr"] / saved["initial_lr"])
    winner, other = ({**saved, **kept}, saved) if configured else (saved, group)
    plan.groups.append((group, winner))
    plan.overridden.extend(
        f"{each} of {name} is {_plain(winner[each])}, not {_plain(other[each])}" for each in differing
    )


def _equal(one: Any, other: Any) -> bool:
    one, other = _plain(one), _plain(other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _plain(value: Any) -> Any:
    """Return a scalar tensor as a number, and a list (JSON's form of a tuple) as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def create_slots(plan: OptimizerPlan) -> list[tuple[str, LiveTensor]]:
    """Give the optimizers exactly the saved slots, and the live groups their hyperparameters. Live slots that fit are
    kept, and a live tensor among hyperparameters takes the value in place. Returned: the slots to fill, by key.
    """
    planned = {id(new.part.tensor) for new in plan.states}
    for optimizer in plan.optimizers:
        for tensor in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in planned]:
            del optimizer.state[tensor]
    to_fill: list[tuple[str, LiveTensor]] = []
    for new in plan.states:
        part, optimizer = new.part, plan.optimizers[new.index]
        live = _live_state(optimizer, new)
        plain = plain_slots(live)
        state = {k: v if part.flat is None else _like_live(plain.get(k), v) for k, v in new.values.items()}
        for slot, wanted in new.tensors.items():
            if slot not in new.shared:
                state[slot] = _slot_tensor(new, slot, plain.get(slot), wanted)
                to_fill.extend((key, part.view(fqn, state[slot])) for fqn, key in wanted.keys.items())
                continue
            value = plan.scalars[next(iter(wanted.keys.values()))]
            if _is_number(plain.get(slot)):
                state[slot] = _like_live(plain[slot], value.item())
            else:
                state[slot] = _slot_tensor(new, slot, plain.get(slot), wanted)
                state[slot].detach().copy_(value)
        for name, value in live.items():
            if has_tensors_inside(value):  # a tensor subclass, rebuilt from its plain tensors
                names, settings = value.__tensor_flatten__()
                inside = {each: state.pop(f"{name}.{each}") for each in names}
                state[name] = type(value).__tensor_unflatten__(inside, settings, value.size(), value.stride())
        optimizer.state[part.tensor] = state
    for group, values in plan.groups:
        for name, value in values.items():
            if isinstance(group.get(name), Tensor):
                group[name].detach().copy_(torch.as_tensor(value, dtype=group[name].dtype))
            else:
                group[name] = value
    return to_fill


def _live_state(optimizer: Optimizer, new: NewState) -> Mapping[str, Any]:
    """Return the live state, or the state after a first step if saved tensors belong inside tensor subclasses."""
    part = new.part
    live: Mapping[str, Any] = optimizer.state.get(part.tensor, {})
    if live or part.flat is not None or not any("." in slot for slot in {**new.values, **new.tensors}):
        return live
    (shape,) = part.shapes.values()
    found = optimizer_state.state_of_small(optimizer, part.tensor.detach().new_zeros(shape))
    return {} if found is None else found[0]


def _like_live(live: Any, value: Any) -> Any:
    """Return a saved number in the live form: a number, or a scalar tensor, as optimizers of flat tensors keep it."""
    if not _is_number(value):
        return value
    if isinstance(live, Tensor) and live.ndim == 0:
        return torch.full_like(live, value)
    return type(live)(value) if _is_number(live) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _slot_tensor(new: NewState, slot: str, live: Any, wanted: NewTensor) -> Tensor:
    """Return the live slot if it fits, else a zero tensor."""
    stepped = new.part.tensor
    has_its_shape = wanted.shape == tuple(stepped.shape) and not wanted.is_scalar
    if (
        isinstance(live, Tensor)
        and tuple(live.shape) == wanted.shape
        and live.dtype == wanted.dtype
        and isinstance(live, DTensor) == (has_its_shape and isinstance(stepped, DTensor))
    ):
        # Padding stays zero, and parameters without saved state start from zero.
        if new.part.flat is not None:
            live.detach().zero_()
        return live
    if has_its_shape and new.part.new_slot is not None:
        return new.part.new_slot(slot)
    if has_its_shape:
        return torch.zeros_like(stepped.detach(), dtype=wanted.dtype, memory_format=torch.preserve_format)
    # As torch.optim on load: a step count stays on the host unless a fused or captured step reads it.
    on_host = slot == "step" and not (new.settings.get("capturable") or new.settings.get("fused"))
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device="cpu" if on_host else stepped.device)
