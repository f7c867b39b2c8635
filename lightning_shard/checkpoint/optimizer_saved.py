"""What of the state of optimizers is in a checkpoint, by the parameter names that it was saved under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_shard.checkpoint.layout import MODEL_PREFIX, OPTIMIZER_PREFIX, model_key
from lightning_shard.checkpoint.manifest import Manifest, TensorEntry
from lightning_shard.checkpoint.optimizer import Values
from lightning_shard.tensors.names import Names


@dataclass(frozen=True)
class SavedOptimizer:
    """What one optimizer's state is in the checkpoint."""

    index: int
    manifest: Manifest
    entries: Mapping[str, Mapping[str, TensorEntry]]
    """FQN as stored to slot to entry."""

    values: Mapping[str, Values]
    """FQN as stored to slots that are no tensors."""

    homes: Mapping[str, Values]
    """FQN as stored to its group."""

    other_names: Mapping[str, list[str]]
    """Live FQN to the names under which its state may be, where that is not its own alone."""

    def name_of(self, fqn: str) -> str | None:
        """The name that the state of a live parameter goes by; None if the saved optimizer did not step it."""
        return next((name for name in self.other_names.get(fqn, [fqn]) if name in self.homes), None)

    def weights(self, stored: str) -> TensorEntry | None:
        """The saved parameter itself."""
        key = model_key(stored)
        return self.manifest.tensors.get(self.manifest.aliases.get(key, key))

    def scalars(self) -> set[str]:
        """Names of slots that are seen to be scalars beside a parameter that is none."""
        found = set()
        for stored, slots in self.entries.items():
            weights = self.weights(stored)
            if weights is not None and weights.shape != ():
                found |= {slot for slot, entry in slots.items() if entry.shape == ()}
        return found


def entries_by_parameter(manifest: Manifest) -> dict[int, dict[str, dict[str, TensorEntry]]]:
    """Optimizer index to FQN as stored to slot to entry."""
    names = {key.removeprefix(MODEL_PREFIX) for key in manifest.tensors if key.startswith(MODEL_PREFIX)}
    found: dict[int, dict[str, dict[str, TensorEntry]]] = {}
    for key, entry in manifest.tensors.items():
        if not key.startswith(OPTIMIZER_PREFIX):
            continue
        _, index, rest = key.split(".", 2)
        # No parameter's name is the beginning of another's at a dot, so that one split at most fits.
        parts = rest.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:end]) in names:
                slots = found.setdefault(int(index), {}).setdefault(".".join(parts[:end]), {})
                slots[".".join(parts[end:])] = entry
                break
    return found


def saved_names(names: Names, manifest: Manifest) -> dict[str, list[str]]:
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
