"""Giving saved optimizer state to live optimizers, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.layout import MODEL_PREFIX, OPTIMIZER_PREFIX, model_key, optimizer_key, torch_dtype
from lightning_shard.checkpoint.manifest import Manifest, TensorEntry
from lightning_shard.checkpoint.optimizer import Values, check_slot, hyperparameters, parameter_name
from lightning_shard.checkpoint.state import Names
from lightning_shard.errors import CheckpointError


@dataclass(frozen=True)
class NewTensor:
    """A slot tensor that is to be read from the checkpoint's files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OptimizerPlan:
    """How saved optimizer state fits live optimizers; nothing is changed before it is applied."""

    slots: list[tuple[Tensor, dict[str, Any], Values]]
    """Per parameter with saved state: the parameter, its group, and its slots (a NewTensor where one is due)."""

    tensors: dict[str, tuple[Tensor, str]]
    """Key to parameter and slot name, of each slot that is read from the checkpoint's files."""

    groups: list[tuple[dict[str, Any], Values]]
    """Live group and its saved hyperparameters."""

    missing: list[str]
    """Live parameters that the saved optimizer did not step, as ``optimizer.<i>.<fqn>``."""

    unexpected: list[str]
    """Saved keys for which there is no live parameter."""

    problems: list[str]
    """What can't be loaded even in part."""


def plan_optimizers(
    optimizers: Sequence[Optimizer], names: Names, manifest: Manifest, saved: Sequence[Mapping[str, Any]]
) -> OptimizerPlan:
    """Match live optimizers with saved ones (``saved`` as `optimizer_groups` gave it) by parameter name.

    The order of groups and of parameters in them does not matter. Tied names are followed.
    """
    plan = OptimizerPlan([], {}, [], [], [], [])
    if len(saved) != len(optimizers):
        plan.problems.append(f"{len(saved)} optimizers were saved, here are {len(optimizers)}")
        return plan
    entries = _entries_by_parameter(manifest)
    other_names = _saved_names(names, manifest)
    for index, (optimizer, described) in enumerate(zip(optimizers, saved, strict=True)):
        homes = {fqn: group for group in described["groups"] for fqn in group["params"]}
        taken: set[str] = set()
        for position, group in enumerate(optimizer.param_groups):
            sources: list[Values] = []
            for place, parameter in enumerate(group["params"]):
                fqn = parameter_name(index, position, place, parameter, names)
                stored = next((name for name in other_names.get(fqn, [fqn]) if name in homes), None)
                if stored is None:
                    plan.missing.append(f"{OPTIMIZER_PREFIX}{index}.{fqn}")
                    continue
                taken.add(stored)
                if not any(source is homes[stored] for source in sources):
                    sources.append(homes[stored])
                _plan_slots(plan, index, fqn, stored, parameter, group, entries, described, manifest)
            _plan_group(plan, index, position, group, sources)
        gone = set(homes) - taken
        plan.unexpected.extend(sorted(f"{OPTIMIZER_PREFIX}{index}.{fqn}" for fqn in gone))
    return plan


def _plan_slots(
    plan: OptimizerPlan,
    index: int,
    fqn: str,
    stored: str,
    parameter: Tensor,
    group: dict[str, Any],
    entries: Mapping[tuple[int, str], Mapping[str, TensorEntry]],
    described: Mapping[str, Any],
    manifest: Manifest,
) -> None:
    slots: Values = dict(described["slots"].get(stored, {}))
    for slot, entry in entries.get((index, stored), {}).items():
        key = optimizer_key(index, fqn, slot)
        try:
            check_slot(key, entry.shape, parameter)
        except CheckpointError as error:
            plan.problems.append(str(error))
            continue
        weights = manifest.tensors.get(manifest.aliases.get(model_key(stored), model_key(stored)))
        # State that had its parameter's dtype follows the parameter to the dtype that it has here.
        follows = weights is not None and weights.dtype == entry.dtype and entry.shape == tuple(parameter.shape)
        dtype = parameter.dtype if follows else torch_dtype(entry.dtype)
        slots[slot] = NewTensor(entry.shape, dtype)
        plan.tensors[key] = (parameter, slot)
    if slots:
        plan.slots.append((parameter, group, slots))


def _plan_group(plan: OptimizerPlan, index: int, position: int, group: dict[str, Any], sources: list[Values]) -> None:
    values = [hyperparameters(source) for source in sources]
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


def create_slots(optimizers: Sequence[Optimizer], plan: OptimizerPlan) -> dict[str, Tensor]:
    """Give the optimizers exactly the saved slots, tensors not filled yet; returns them by key to be loaded.

    A tensor that is there already with the right shape, dtype and placement is kept.
    """
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for optimizer in optimizers:
        planned = {id(parameter) for parameter, _, _ in plan.slots}
        for parameter in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in planned]:
            del optimizer.state[parameter]
    for parameter, group, slots in plan.slots:
        optimizer = owners[id(parameter)]
        live = optimizer.state.get(parameter, {})
        optimizer.state[parameter] = {
            slot: _tensor(live.get(slot), value, slot, parameter, group) if isinstance(value, NewTensor) else value
            for slot, value in slots.items()
        }
    return {key: owners[id(parameter)].state[parameter][slot] for key, (parameter, slot) in plan.tensors.items()}


def _tensor(live: Any, wanted: NewTensor, slot: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    whole = wanted.shape == tuple(parameter.shape) and (len(wanted.shape) > 0 or slot != "step")
    if (
        isinstance(live, Tensor)
        and tuple(live.shape) == wanted.shape
        and live.dtype == wanted.dtype
        and isinstance(live, DTensor) == (whole and isinstance(parameter, DTensor))
    ):
        return live
    if whole:
        return torch.zeros_like(parameter.detach(), dtype=wanted.dtype, memory_format=torch.preserve_format)
    # As torch.optim does on load: a step count stays on the host unless a fused or captured step reads it.
    on_host = slot == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device="cpu" if on_host else parameter.device)


def load_groups(plan: OptimizerPlan) -> None:
    """Give the live groups their saved hyperparameters; a live tensor keeps its identity and takes the value."""
    for group, values in plan.groups:
        for name, value in values.items():
            live = group.get(name)
            if isinstance(live, Tensor):
                with torch.no_grad():
                    live.copy_(torch.as_tensor(value, dtype=live.dtype))
            else:
                group[name] = value


def _entries_by_parameter(manifest: Manifest) -> dict[tuple[int, str], dict[str, TensorEntry]]:
    """(optimizer index, FQN as stored) to slot to entry."""
    names = {key.removeprefix(MODEL_PREFIX) for key in manifest.tensors if key.startswith(MODEL_PREFIX)}
    found: dict[tuple[int, str], dict[str, TensorEntry]] = {}
    for key, entry in manifest.tensors.items():
        if not key.startswith(OPTIMIZER_PREFIX):
            continue
        _, index, rest = key.split(".", 2)
        # No parameter's name is the beginning of another's at a dot, so that one split at most fits.
        parts = rest.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:end]) in names:
                found.setdefault((int(index), ".".join(parts[:end])), {})[".".join(parts[end:])] = entry
                break
    return found


def _saved_names(names: Names, manifest: Manifest) -> dict[str, list[str]]:
    """Live FQN to the names under which its state may be saved, where tying is involved on either side."""
    candidates: dict[str, list[str]] = {}
    for alias, fqn in names.aliases.items():
        candidates.setdefault(fqn, [fqn]).append(alias)
    stored = {
        alias.removeprefix(MODEL_PREFIX): key.removeprefix(MODEL_PREFIX) for alias, key in manifest.aliases.items()
    }
    for fqn in names.tensors:
        known = candidates.get(fqn, [fqn])
        extra = [stored[name] for name in known if name in stored]
        if extra:
            candidates[fqn] = known + extra
    return candidates


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
