"""Reading and writing one stock Lightning ``.ckpt`` file tensor by tensor: the ``full`` form, and Lightning's own.

Stock files number the parameters of an optimizer. The ``full`` form adds their names. For Lightning's own, a live run
gives them.
"""

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.archive import read_archive, write_archive
from lightning_shard.checkpoint.files.manifest import FULL, Contents, Facts, StoredTensor
from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.optimizer_state import groups_of, hyperparameters
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import AnyOptimizer
from lightning_shard.tensors.names import fqns

NOTES = "lightning_shard_full"
"""Key of the ``full`` form for our own notes, which stock Lightning ignores."""


def write_full(path: str | os.PathLike[str], stored: Contents) -> None:
    """Write ``stored`` as one stock Lightning file, atomically. One process calls it. CheckpointError."""
    target = Path(os.path.abspath(path))
    commit.check_replaceable(target)
    encode_trainer_state(stored.trainer_state, stock=True)  # refuses values that readers of the file would refuse
    target.parent.mkdir(parents=True, exist_ok=True)
    token = layout.new_token()
    temporary = layout.temporary_sibling(target, token)
    with commit.deleted_on_failure(temporary):
        temporary.touch()
        commit.lock(temporary)
        with layout.damaged_if("the run's state has another form"):
            tree = _stock_checkpoint(stored)
        write_archive(temporary, tree)
        commit.publish_checkpoint(temporary, target, token)


def _stock_checkpoint(stored: Contents) -> dict[str, Any]:
    """Make the dictionary that ``Trainer.dump_checkpoint`` returns under one process."""
    state = dict(stored.whole_state)
    extra = state.pop(layout.EXTRA_STATE, {})
    saved = state.pop(layout.OPTIMIZER_STATES, None)
    weights = layout.without_prefix(layout.MODEL_PREFIX, stored.tensors)
    averages = layout.without_prefix(layout.AVERAGE_PREFIX, stored.tensors)
    tied = {alias.removeprefix(layout.MODEL_PREFIX): stored.tensors[key] for alias, key in stored.aliases.items()}
    facts = asdict(stored.facts)
    facts.pop("run")
    notes = {
        **facts,
        "tensors": [*weights, *tied],
        "optimizers": [[fqn for group in part["groups"] for fqn in group["params"]] for part in saved or []],
        "classes": [part["class"] for part in saved or []],
    }
    if saved is not None:
        slots: dict[tuple[int, str], dict[str, StoredTensor]] = {}
        for key, name in stored.slots.items():
            slots.setdefault((name.optimizer, name.fqn), {})[name.slot] = stored.tensors[key]
        state[layout.OPTIMIZER_STATES] = [_stock_optimizer(part, slots, index) for index, part in enumerate(saved)]
    if "fit_loop" in (loops := state.get("loops", {})):
        # Our own part has loaders' states by rank. A stock Trainer has no loader that takes them.
        fit = loops["fit_loop"]
        without_positions = {**fit, "state_dict": {**fit["state_dict"], "combined_loader": []}}
        state["loops"] = {**loops, "fit_loop": without_positions}
    own = {**weights, **tied, **extra}
    if averages:
        names = {a: key.removeprefix(layout.MODEL_PREFIX) for a, key in zip(tied, stored.aliases.values(), strict=True)}
        state["current_model_state"] = own
        own = {fqn: averages.get(names.get(fqn, fqn), tensor) for fqn, tensor in own.items()}
    return {**state, "state_dict": own, NOTES: notes}


def _stock_optimizer(
    described: Mapping[str, Any], slots: Mapping[tuple[int, str], Mapping[str, StoredTensor]], index: int
) -> dict[str, Any]:
    """Make the ``Optimizer.state_dict()``: state and groups by number."""
    numbers = itertools.count()
    named = [{next(numbers): fqn for fqn in group["params"]} for group in described["groups"]]
    plain = described["slots"]
    state = {n: {**plain.get(f, {}), **slots.get((index, f), {})} for names in named for n, f in names.items()}
    groups = [{**hyperparameters(g), "params": [*names]} for g, names in zip(described["groups"], named, strict=True)]
    return {"state": {number: values for number, values in state.items() if values}, "param_groups": groups}


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """Names that a stock file lacks."""

    # FQNs of parameters and persistent buffers, tied ones under all names. Other entries are extra state.
    tensors: Collection[str]
    optimizers: Sequence[Sequence[str]]  # FQNs of each optimizer's parameters in the order of their numbers

    @staticmethod
    def of(module: nn.Module, optimizers: Sequence[AnyOptimizer]) -> "ModuleNames":
        names = fqns(module)
        stepped = [
            [name for group in groups_of(index, optimizer, names) for name in group.names]
            for index, optimizer in enumerate(optimizers)
        ]
        return ModuleNames(tensors={*names.tensors, *names.aliases}, optimizers=stepped)


def open_full(path: str | os.PathLike[str], names: ModuleNames | None = None, *, number: bool = False) -> Contents:
    """Open the stock Lightning file ``path``. No tensor is read yet. Optimizer state that stock Lightning wrote needs
    ``names``, or ``number`` to call its parameters ``#0``, ``#1``, ... CheckpointCorruptError: a file that is damaged
    or names another class. CheckpointMismatchError: optimizer state without names.
    """
    tree = read_archive(Path(path))
    if not isinstance(tree, dict) or not isinstance(tree.get("state_dict"), dict):
        raise CheckpointError(
            f"{path} is no Lightning checkpoint: there is no state_dict in it. If it has weights alone, load them "
            f"before the fit (module.load_state_dict(torch.load({str(path)!r}))), in place of ckpt_path."
        )
    with layout.damaged_if(f"{path} is no Lightning checkpoint"):
        return _stored(path, tree, names, number)


def _stored(path: str | os.PathLike[str], tree: dict[str, Any], names: ModuleNames | None, number: bool) -> Contents:
    notes = tree.pop(NOTES, {})
    if notes:
        names = ModuleNames(tensors=set(notes["tensors"]), optimizers=notes["optimizers"])
    own, averaged = tree.pop("state_dict"), {}
    if "current_model_state" in tree and layout.AVERAGING_STATE in tree:
        own, averaged = tree.pop("current_model_state"), own
    weights, aliases, extra = _module_tensors(own, names)
    averages = {fqn: StoredTensor.of(average) for fqn, average in averaged.items() if fqn in weights}
    states = tree.pop(layout.OPTIMIZER_STATES, None)
    state = {**tree, layout.EXTRA_STATE: extra}
    slots: dict[layout.SlotName, StoredTensor] = {}
    if states is not None:
        stepped = _named(path, states, names, number)
        classes = notes.get("classes") or ["unknown"] * len(states)
        state[layout.OPTIMIZER_STATES] = [
            described_optimizer(*part, slots) for part in zip(range(len(states)), states, stepped, classes, strict=True)
        ]
    facts = Facts(
        engine=notes.get("engine", "stock Lightning"),
        policy=notes.get("policy", "not recorded"),
        ledger=notes.get("ledger", {}),
        world_size=notes.get("world_size", 1),
        versions=notes.get("versions", {"lightning": str(tree.get("pytorch-lightning_version", "unknown"))}),
    )
    return Contents.of(weights, aliases, slots, averages, form=FULL, facts=facts, trainer_state=state)


def is_extra(name: str, value: Any) -> bool:
    """True if an entry of another library's ``state_dict`` is extra state, by type or torch's name of it."""
    return not isinstance(value, (Tensor, StoredTensor)) or name.endswith("_extra_state")


def _module_tensors(
    state_dict: Mapping[str, Any], names: ModuleNames | None
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, Any]]:
    """Return tensors and aliases by FQN, and extra state by name."""
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    places: dict[Any, str] = {}
    for fqn, value in state_dict.items():
        if is_extra(fqn, value) or (names is not None and fqn not in names.tensors):
            extra[fqn] = value
            continue
        # Tensors without elements share an address without being tied.
        place = value.dtype, value.data_ptr(), value.shape, value.stride()
        first = places.setdefault(place, fqn) if value.nbytes else fqn
        if first == fqn:
            tensors[fqn] = StoredTensor.of(value)
        else:
            aliases[fqn] = first
    return tensors, aliases, extra


def _named(
    path: str | os.PathLike[str], states: Sequence[Mapping[str, Any]], names: ModuleNames | None, number: bool
) -> Sequence[Sequence[str]]:
    """Return names by optimizer, in the order of groups, checked against the file's numbers of parameters."""
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


def described_optimizer(
    index: int, state: Mapping[str, Any], stepped: Sequence[str], kind: str, slots: dict[layout.SlotName, StoredTensor]
) -> dict[str, Any]:
    """Describe a ``state_dict`` as `optimizer_states` does, with tensors in ``slots``. ``stepped``: FQNs in order."""
    name_of = dict(zip([number for group in state["param_groups"] for number in group["params"]], stepped, strict=True))
    plain: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        for slot, value in values.items():
            if isinstance(value, (Tensor, StoredTensor)):
                stored = value if isinstance(value, StoredTensor) else StoredTensor.of(value)
                slots[layout.SlotName(index, name_of[number], slot)] = stored
            else:
                plain.setdefault(name_of[number], {})[slot] = value
    groups = []
    for group in state["param_groups"]:
        own = hyperparameters(group)
        # A learning rate that is a tensor becomes a number.
        own |= {name: v.item() for name, v in own.items() if isinstance(v, Tensor) and v.ndim == 0}
        groups.append({"params": [name_of[number] for number in group["params"]], **own})
    return {"class": kind, "groups": groups, "slots": plain}
