"""Which of a checkpoint's tensors belong to which of those asked for, and what does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_shard.checkpoint.manifest import Manifest
from lightning_shard.checkpoint.metadata import alias_keys
from lightning_shard.errors import CheckpointMismatchError

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Keys that a load with ``strict=False`` left alone; both empty after a strict one."""

    missing: tuple[str, ...] = ()
    """Asked for, not in the checkpoint: these tensors kept their values."""

    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not asked for."""


@dataclass(frozen=True)
class Fit:
    """The outcome of a comparison; ``reshaped`` tells both shapes, the others are keys."""

    sources: dict[str, str]
    """Key asked for to the key that it is stored under."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def judged(self, path: str | os.PathLike[str], strict: bool, problems: list[str]) -> LoadReport:
        """What to report of a fit that is good enough; CheckpointMismatchError of one that is not."""
        if not self.sources and (self.missing or self.unexpected):
            raise CheckpointMismatchError(
                f"nothing in {path} matches the model by name. It asks for {listed(self.missing)}; the checkpoint has "
                f"{listed(self.unexpected)}"
            )
        if self.reshaped or problems or (strict and (self.missing or self.unexpected)):
            lines = [f"{path} does not fit:"]
            for kind, keys in (
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
                ("of another shape", self.reshaped),
            ):
                if keys:
                    lines.append(f"  {kind} ({len(keys)}): {listed(keys)}")
            lines += [f"  {problem}" for problem in problems[:_SHOWN]]
            if not self.reshaped and not problems:
                lines.append("  strict=False loads what matches.")
            raise CheckpointMismatchError("\n".join(lines))
        return LoadReport(missing=tuple(self.missing), unexpected=tuple(self.unexpected))


def compare(
    manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], prefixes: tuple[str, ...]
) -> Fit:
    """Where each key asked for is stored, tied names followed on both sides, and what does not fit."""
    stored_names = {key: key for key in manifest.tensors} | dict(alias_keys(manifest.tensors, manifest.aliases))
    further: dict[str, list[str]] = {}
    for other, key in alias_keys(shapes, aliases):
        further.setdefault(key, []).append(other)
    sources: dict[str, str] = {}
    missing, reshaped = [], []
    for key, shape in shapes.items():
        stored = next((stored_names[name] for name in [key, *further.get(key, ())] if name in stored_names), None)
        if stored is None:
            missing.append(key)
        elif manifest.tensors[stored].shape != shape:
            sources[key] = stored
            reshaped.append(f"{key} {manifest.tensors[stored].shape} there, {shape} here")
        else:
            sources[key] = stored
    known = set(sources.values()) | {name for names in further.values() for name in names}
    unexpected = [key for key in manifest.tensors if key not in known and key.startswith(prefixes)]
    return Fit(sources, missing, unexpected, reshaped)


def listed(keys: Iterable[str]) -> str:
    keys = sorted(keys)
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (", ".join(keys[:_SHOWN]) or "nothing") + more
