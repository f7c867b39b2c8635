"""The ``full`` form: one stock Lightning ``.ckpt`` file, which opens without this package.

Written from any other form, tensor by tensor; `lightning_file` reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.archive import write_archive
from lightning_shard.checkpoint.collect import EXTRA_STATE, OPTIMIZER_STATES, State
from lightning_shard.checkpoint.layout import MODEL_PREFIX, OPTIMIZER_PREFIX
from lightning_shard.checkpoint.optimizer import hyperparameters
from lightning_shard.checkpoint.plan import Plan, Plans, Values
from lightning_shard.checkpoint.save import Begun, begin
from lightning_shard.checkpoint.stored import NOTES, Stored, StoredTensor, open_portable
from lightning_shard.errors import CheckpointCorruptError
from lightning_shard.ranks import Ranks


def names_full(path: str) -> bool:
    """Whether a checkpoint that is saved to this path is one file in the ``full`` form: it ends in ``.full.ckpt``.

    Lightning's ModelCheckpoint makes ``.full-v1.ckpt`` of it where there is one of that name already.
    """
    return re.search(r"\.full(-v\d+)?\.ckpt$", path) is not None


def begin_full(
    ranks: Ranks, path: str | os.PathLike[str], collect: Callable[[], State], plans: Plans
) -> tuple[BegunFull, State]:
    """As `lightning_shard.checkpoint.save.begin`, of a save to one file in the ``full`` form.

    Rank 0 writes it from a directory beside it, which is removed then, so that no rank ever holds more than one whole
    tensor.
    """

    def place() -> tuple[str, str]:
        target = Path(os.path.abspath(path))
        commit.check_replaceable(target)
        return str(target), str(commit.temporary_sibling(target, commit.new_token()))

    target, parts = ranks.first(f"starting to save {path}", place)
    begun, state = begin(ranks, parts, collect, plans)
    return BegunFull(target=Path(target), parts=begun), state


@dataclass(frozen=True, kw_only=True)
class BegunFull:
    """As `lightning_shard.checkpoint.save.Begun`, of a save to one file."""

    target: Path
    parts: Begun

    @property
    def plan(self) -> Plan:
        """Of the directory."""
        return self.parts.plan

    def finish(self, ranks: Ranks, values: Values) -> None:
        """Write the values and put the file in place. All ranks call it."""
        self.parts.finish(ranks, values)

        def write() -> None:
            try:
                write_full(self.target, open_portable(self.parts.target))
            finally:
                commit.remove(self.parts.target)

        ranks.first(f"writing {self.target}", write)


def write_full(path: str | os.PathLike[str], stored: Stored) -> None:
    """Write ``stored`` as one stock Lightning file at ``path``, in place at once. One process calls it.

    Memory holds one tensor at a time. Raises CheckpointError where a directory that is no checkpoint is at the path.
    """
    target = Path(os.path.abspath(path))
    commit.check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    token = commit.new_token()
    temporary = commit.temporary_sibling(target, token)
    try:
        write_archive(temporary, _stock_checkpoint(stored))
        commit.publish(temporary, target, token)
    except BaseException:
        commit.delete_tree(temporary)
        raise


def _stock_checkpoint(stored: Stored) -> dict[str, Any]:
    """What ``Trainer.dump_checkpoint`` would have returned under one process."""
    state = dict(stored.trainer_state)
    extra = state.pop(EXTRA_STATE, {})
    saved = state.pop(OPTIMIZER_STATES, None)
    weights = {key.removeprefix(MODEL_PREFIX): t for key, t in stored.tensors.items() if key.startswith(MODEL_PREFIX)}
    tied = {alias.removeprefix(MODEL_PREFIX): stored.tensors[key] for alias, key in stored.aliases.items()}
    stepped = [[fqn for group in part["groups"] for fqn in group["params"]] for part in saved or []]
    notes = {
        "engine": stored.engine,
        "policy": stored.policy,
        "ledger": stored.ledger,
        "world_size": stored.world_size,
        "versions": dict(stored.versions),
        "tensors": [*weights, *tied],
        "optimizers": stepped,
        "classes": [part["class"] for part in saved or []],
    }
    if saved is not None:
        slots = _slots_by_parameter(stored.tensors, stepped)
        state[OPTIMIZER_STATES] = [_stock_optimizer(part, slots, index) for index, part in enumerate(saved)]
    if "fit_loop" in state.get("loops", {}):
        state["loops"] = _without_loader_positions(state["loops"])
    return {**state, "state_dict": {**weights, **tied, **extra}, NOTES: notes}


def _without_loader_positions(loops: Mapping[str, Any]) -> dict[str, Any]:
    """Loaders' states are in our own part, by rank; a stock Trainer has no loader that takes them."""
    fit = loops["fit_loop"]
    return {**loops, "fit_loop": {**fit, "state_dict": {**fit["state_dict"], "combined_loader": []}}}


def _stock_optimizer(
    described: Mapping[str, Any], slots: Mapping[tuple[int, str], Mapping[str, StoredTensor]], index: int
) -> dict[str, Any]:
    """``Optimizer.state_dict()``: state and groups by number."""
    state, groups, number = {}, [], 0
    for group in described["groups"]:
        numbers = []
        for fqn in group["params"]:
            values = {**described["slots"].get(fqn, {}), **slots.get((index, fqn), {})}
            if values:
                state[number] = values
            numbers.append(number)
            number += 1
        groups.append({**hyperparameters(group), "params": numbers})
    return {"state": state, "param_groups": groups}


def _slots_by_parameter(
    tensors: Mapping[str, StoredTensor], stepped: Sequence[Sequence[str]]
) -> dict[tuple[int, str], dict[str, StoredTensor]]:
    """(optimizer, FQN) to slot to tensor."""
    known = [set(fqns) for fqns in stepped]
    found: dict[tuple[int, str], dict[str, StoredTensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(OPTIMIZER_PREFIX):
            continue
        _, index, rest = key.split(".", 2)
        parts = rest.split(".")
        # No parameter's name is the beginning of another's at a dot, so that one split at most fits.
        ends = (end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in known[int(index)])
        if (end := next(ends, None)) is None:
            raise CheckpointCorruptError(f"{key} belongs to no parameter in the optimizer's groups")
        found.setdefault((int(index), ".".join(parts[:end])), {})[".".join(parts[end:])] = tensor
    return found
