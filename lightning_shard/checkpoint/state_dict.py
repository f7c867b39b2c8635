"""A checkpoint's ``state_dict`` as the module's own code sees and changes it, before a save and before a load.

Before a load each tensor is a `StoredValues`, so that nothing is read for a name that is only renamed or deleted. A
tensor that the code computes replaces it, in full on the host of every rank.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_shard.checkpoint.files.layout import MODEL_PREFIX, without_prefix
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.checkpoint.files.tensor_files import fill
from lightning_shard.checkpoint.optimizer_state import left_out, sharded_names
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import LiveTensor, local
from lightning_shard.tensors.full import full_of
from lightning_shard.tensors.names import Names, fqns
from lightning_shard.tensors.tracing import storage_key, tree_map_only
from lightning_shard.text import listed


class OfferedState:
    """The state offered to ``on_save_checkpoint``, which may take out names but not add any or change values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._given: Mapping[str, LiveTensor] = {}

    def offer(self, masters: Mapping[str, LiveTensor]) -> dict[str, LiveTensor]:
        """Return name, tied ones too, to live tensor or master, of the names in the module's ``state_dict()``."""
        names = sharded_names(self._module)
        own = {**names.tensors, **{alias: names.tensors[fqn] for alias, fqn in names.aliases.items()}}
        without = left_out(self._module, names)
        self._given = {name: tensor for name, tensor in {**own, **masters}.items() if name not in without}
        return dict(self._given)

    def left_out(self, kept: Mapping[str, Any]) -> set[str]:
        """Return rank 0's names of the module that ``kept`` lacks, on every rank. All ranks call it."""
        names, given, self._given = fqns(self._module).tensors, self._given, {}

        def missing_names() -> list[str]:
            other = [name for name in kept if name not in given or not _is_the_same(kept[name], given[name])]
            if other:
                raise CheckpointError(
                    f"on_save_checkpoint added or replaced {listed(sorted(other))} in the state_dict, but a checkpoint "
                    "has the module's own tensors there. Change their values, or put yours under a key of their own: "
                    "checkpoint['my_key'] = ..."
                )
            return sorted(set(names) - set(kept))

        ranks = Ranks.of()
        doing = "comparing the state_dict after on_save_checkpoint"
        return set(ranks.exchange(doing, missing_names, lambda found: [found[0]] * ranks.size))


def _is_the_same(now: Any, given: LiveTensor) -> bool:
    """True if ``now`` is the tensor ``given``, or one of its kind with equal values."""
    if now is given or not (isinstance(now, Tensor) and isinstance(given, Tensor)):
        return now is given
    ours, theirs = local(now), local(given)
    same_kind = type(now.detach()) is type(given.detach()) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same_kind and torch.equal(ours.detach(), theirs.detach().to(ours.device))


_FACTS = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size", "is_floating_point", "__len__")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim")),
}
"""Functions that need no values of a tensor."""


class StoredValues(Tensor):
    """A full tensor on the host that is read from a checkpoint once more than its shape or dtype is used."""

    key: str
    read: Callable[[str], Tensor]
    full: Tensor | None

    @staticmethod
    def of(key: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[str], Tensor]) -> "StoredValues":
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(StoredValues)
        made.key, made.read, made.full = key, read, None
        return made

    def values(self) -> Tensor:
        """Return the same tensor each time, with changes that were made in place."""
        if self.full is None:
            self.full = self.read(self.key)
        return self.full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class StateDict:
    """The tensor to load under each name of the module."""

    keys: Mapping[str, str]  # name, tied ones too, to key
    shapes: Mapping[str, tuple[int, ...]]  # key to full shape
    values: Mapping[str, Tensor] = field(default_factory=dict)  # key to full tensor that the module's code computed
    kept: frozenset[str] = frozenset()  # names to which the module's code gave the module's own tensors

    @staticmethod
    def of(found: Manifest) -> "StateDict":
        shapes = {key: entry.shape for key, entry in found.tensors.items() if key.startswith(MODEL_PREFIX)}
        own = {key: key for key in shapes}
        return StateDict(keys=without_prefix(MODEL_PREFIX, {**own, **found.aliases}), shapes=shapes)

    def edited(self, state: Mapping[str, Any], names: Names) -> "StateDict":
        """Return the version that the module's code made as ``state``. All ranks call it."""
        keys: dict[str, str] = {}
        values: dict[str, Tensor] = {}
        kept = set()
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"on_load_checkpoint or load_state_dict put a {type(tensor).__name__} under {name!r} into the "
                    "state_dict: only tensors can be loaded. Keep other values under a key of their own in the "
                    "checkpoint."
                )
            live = names.tensors.get(names.aliases.get(name, name))
            if isinstance(tensor, StoredValues) and tensor.full is None:
                keys[name] = tensor.key
            elif live is not None and not isinstance(tensor, StoredValues) and _place(tensor) == _place(live):
                kept.add(name)
            else:
                keys[name] = key = f"{MODEL_PREFIX}{name} as changed"
                tensor = tensor.values() if isinstance(tensor, StoredValues) else tensor
                values[key] = full_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        shapes = {**self.shapes, **{key: tuple(tensor.shape) for key, tensor in values.items()}}
        shapes = {key: shapes[key] for key in keys.values()}
        return StateDict(keys=keys, shapes=shapes, values=values, kept=frozenset(kept))

    def fill(self, key: str, target: Any) -> bool:
        """Fill this rank's boxes of ``target`` from `values`, casting. False if ``key`` is not among them."""
        if (full := self.values.get(key)) is not None:
            fill(key, target, lambda at, sizes: full[tuple(map(slice, at, map(operator.add, at, sizes)))])
        return full is not None


def _place(tensor: Tensor) -> Any:
    """Return the memory that a tensor shares with its detached copy in ``state_dict()``."""
    own = local(tensor)
    return storage_key(own), own.storage_offset(), own.shape


def follow_names(module: nn.Module, found: Manifest, state: Mapping[str, Any], strict: bool) -> tuple[StateDict, bool]:
    """Apply the module's own ``load_state_dict``, if any, to ``state``, which hooks may have changed. Returned: the
    tensors to load, and whether all must fit. All ranks call it. CheckpointError: values that are no tensors, or none.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        try:
            # An invented missing key raises if the module asks torch to be strict.
            state, strict = _given_to_torch(module, state, strict=strict, missing=[_INVENTED]), False
        except RuntimeError as error:
            if _INVENTED not in str(error):
                raise
            state, strict = _given_to_torch(module, state, strict=strict, missing=[]), True
    return StateDict.of(found).edited(state, sharded_names(module)), strict


_INVENTED = "a key that no module has"


def _given_to_torch(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool, missing: Sequence[str]
) -> Mapping[str, Any]:
    """Record the state that ``module.load_state_dict`` passes to torch, by torch's hooks around it. Nothing is loaded.

    ``missing`` are keys that a load of the whole module then misses. A load of a submodule alone misses none.
    """
    given: list[Mapping[str, Any]] = []
    handles: list[RemovableHandle] = []
    for name, part in module.named_modules():

        def record(
            _: nn.Module, state: dict[str, Any], prefix: str, *rest: Any, name: str = f"{name}." if name else ""
        ) -> None:
            # Torch calls the hooks of submodules too, with their prefix and the state that their parent leaves.
            if not prefix:
                given.append({name + key: tensor for key, tensor in state.items()})
                state.clear()

        def require(part: nn.Module, keys: Any) -> None:
            keys.unexpected_keys.clear()
            keys.missing_keys[:] = missing if part is module else []

        handles += part.register_load_state_dict_pre_hook(record), part.register_load_state_dict_post_hook(require)
    try:
        module.load_state_dict(dict(state), strict=strict)
    finally:
        for handle in handles:
            handle.remove()
    if not given:
        raise CheckpointError(
            f"{type(module).__name__}.load_state_dict gives torch nothing to load, and parameters that are sharded "
            "can't be filled by hand. Change the state_dict there and call super().load_state_dict with it."
        )
    return {key: tensor for part in given for key, tensor in part.items()}
