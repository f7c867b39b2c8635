"""Finding the checkpoint that a run goes on from: its own, and the newest."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.layout import regular_file
from lightning_shard.checkpoint.manifest import read_manifest
from lightning_shard.checkpoint.under_way import settle
from lightning_shard.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is for a run to go on from, in plain values that one rank sends to the others."""

    own: tuple[tuple[str, int], ...]
    """Paths of the run's checkpoints with their optimizer steps, the newest first."""

    broken: tuple[str, ...]
    """Why others of the run are no candidates: a file is missing or has another size."""

    others: tuple[str, ...]
    """Names of other runs that have checkpoints there."""


def find_checkpoints(folders: Iterable[str | os.PathLike[str]], run: str) -> Found:
    """The checkpoints of ``run`` that lie directly in one of ``folders``. One rank calls it.

    The run is the one that the manifest names: a checkpoint without a name, or with weights only, is never taken.
    Newest: of the most optimizer steps, and among those the one that was saved last. Checksums are left to who loads.
    Replacements that were interrupted are finished first, and what this process writes in the background.
    """
    settle()
    own: list[tuple[int, float, str]] = []
    broken: list[str] = []
    others: set[str] = set()
    for folder in {Path(folder).resolve(): None for folder in folders}:
        commit.recover_all(folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.startswith(".") or not path.is_dir():
                continue
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue  # half-written, or no checkpoint
            if manifest.run.get("name") != run:
                others.update([str(manifest.run["name"])] if "name" in manifest.run else [])
                continue
            try:
                for name, entry in manifest.files.items():
                    regular_file(path, name, entry)
            except CheckpointError as error:
                broken.append(str(error))
                continue
            own.append((int(manifest.run["step"]), float(manifest.run["time"]), str(path)))
    newest_first = tuple((path, step) for step, _, path in sorted(own, reverse=True))
    return Found(own=newest_first, broken=tuple(broken), others=tuple(sorted(others)))
