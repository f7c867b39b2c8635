"""Reading one stock Lightning ``.ckpt`` file, of this package's ``full`` form or as Lightning's strategies write it.

Stock files number the parameters that an optimizer steps. Ours note the names beside, a live run knows them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_shard.checkpoint.archive import ArchivedTensor, materialize, read_archive
from lightning_shard.checkpoint.collect import EXTRA_STATE, OPTIMIZER_STATES
from lightning_shard.checkpoint.layout import model_key, optimizer_key
from lightning_shard.checkpoint.optimizer import hyperparameters
from lightning_shard.checkpoint.stepped import groups_of
from lightning_shard.checkpoint.stored import FULL, NOTES, Stored, StoredTensor
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import AnyOptimizer
from lightning_shard.tensors.names import fqns


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """What a stock file does not say: which of its tensors are which of a module's and its optimizers'."""

    tensors: Collection[str]
    """FQNs of parameters and persistent buffers, tied ones under all names; the rest is extra state."""

    optimizers: Sequence[Sequence[str]]
    """Per optimizer the FQNs of its parameters in the order in which it numbers them."""

    @staticmethod
    def of(module: nn.Module, optimizers: Sequence[AnyOptimizer]) -> ModuleNames:
        """Those of a live module, wrapped or not, and its optimizers."""
        names = fqns(module)
        stepped = [
            [name for group in groups_of(index, optimizer, names) for name in group.names]
            for index, optimizer in enumerate(optimizers)
        ]
        return ModuleNames(tensors={*names.tensors, *names.aliases}, optimizers=stepped)


def open_full(path: str | os.PathLike[str], names: ModuleNames | None = None, *, number: bool = False) -> Stored:
    """The stock Lightning file ``path``; no tensor of the model or an optimizer is read yet.

    ``names`` is needed for the optimizer state of a file that stock Lightning wrote; ``number`` calls its parameters
    ``#0``, ``#1``, ... otherwise. Raises CheckpointCorruptError for a file that names a class which checkpoints do
    not need, or is damaged; CheckpointMismatchError for optimizer state that can't be named.
    """
    tree = read_archive(Path(path))
    if not isinstance(tree, dict) or not isinstance(tree.get("state_dict"), dict):
        raise CheckpointError(f"{path} is no Lightning checkpoint: there is no state_dict in it")
    try:
        return _stored(path, tree, names, number)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} is no Lightning checkpoint: {type(error).__name__}: {error}") from error


def _stored(path: str | os.PathLike[str], tree: dict[str, Any], names: ModuleNames | None, number: bool) -> Stored:
    notes = materialize(tree.pop(NOTES, {}))
    if notes:
        names = ModuleNames(tensors=set(notes["tensors"]), optimizers=notes["optimizers"])
    tensors, aliases, extra = _model_tensors(tree.pop("state_dict"), names)
    states = tree.pop(OPTIMIZER_STATES, None)
    state = materialize(tree)
    state[EXTRA_STATE] = materialize(extra)
    if states is not None:
        stepped = _named(path, states, names, number)
        classes = notes.get("classes") or ["unknown"] * len(states)
        parts = [_portable_optimizer(*part) for part in zip(range(len(states)), states, stepped, classes, strict=True)]
        state[OPTIMIZER_STATES] = [described for described, _ in parts]
        tensors |= {key: tensor for _, slots in parts for key, tensor in slots.items()}
    return Stored(
        form=FULL,
        tensors=tensors,
        aliases=aliases,
        trainer_state=state,
        engine=notes.get("engine", "stock Lightning"),
        policy=notes.get("policy", "not recorded"),
        ledger=notes.get("ledger", {}),
        world_size=notes.get("world_size", 1),
        versions=notes.get("versions", {"lightning": str(tree.get("pytorch-lightning_version", "unknown"))}),
    )


def _model_tensors(
    state_dict: Mapping[str, Any], names: ModuleNames | None
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, Any]]:
    """Tensors and aliases by key, and what is neither parameter nor buffer by name."""
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    places: dict[Any, str] = {}
    for fqn, value in state_dict.items():
        if not isinstance(value, ArchivedTensor) or (names is not None and fqn not in names.tensors):
            extra[fqn] = value
            continue
        key = model_key(fqn)
        # Tensors without elements lie in one place without being tied.
        first = places.setdefault((value.dtype, *value.place), key) if value.nbytes else key
        if first == key:
            tensors[key] = value
        else:
            aliases[key] = first
    return tensors, aliases, extra


def _named(
    path: str | os.PathLike[str], states: Sequence[Mapping[str, Any]], names: ModuleNames | None, number: bool
) -> Sequence[Sequence[str]]:
    """Names by optimizer, in the order of the groups, checked against how many parameters the file has."""
    counts = [sum(len(group["params"]) for group in state["param_groups"]) for state in states]
    if names is not None and [len(stepped) for stepped in names.optimizers] == counts:
        return names.optimizers
    if number:
        return [[f"#{n}" for group in state["param_groups"] for n in group["params"]] for state in states]
    if names is None:
        raise CheckpointMismatchError(
            f"{path} numbers the parameters that its optimizers step, and only a run that builds the same optimizers "
            "knows their names. Resume from it with ckpt_path=, save there, and convert that; or leave the optimizer "
            "state out (weights only)."
        )
    raise CheckpointMismatchError(
        f"{path} has optimizers that step {counts} parameters, here they step "
        f"{[len(stepped) for stepped in names.optimizers]}: build the same optimizers, or load the weights only"
    )


def _portable_optimizer(
    index: int, state: Mapping[str, Any], stepped: Sequence[str], kind: str
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The groups' description and the slots' tensors of one optimizer."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, stepped, strict=True))
    groups = [
        {"params": [name_of[number] for number in group["params"]], **materialize(hyperparameters(group))}
        for group in state["param_groups"]
    ]
    tensors = {
        optimizer_key(index, name_of[number], slot): value
        for number, slot, value in _slots(state["state"])
        if isinstance(value, StoredTensor)
    }
    plain: dict[str, dict[str, Any]] = {}
    for number, slot, value in _slots(state["state"]):
        if not isinstance(value, StoredTensor):
            plain.setdefault(name_of[number], {})[slot] = materialize(value)
    return {"class": kind, "groups": _plain_scalars(groups), "slots": plain}, tensors


def _slots(state: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[Any, str, Any]]:
    return ((number, slot, value) for number, slots in state.items() for slot, value in slots.items())


def _plain_scalars(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A learning rate that is a tensor becomes a number, as `optimizer_groups` has it."""
    return [
        {name: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for name, v in group.items()}
        for group in groups
    ]
