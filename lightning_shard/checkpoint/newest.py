"""Finding the checkpoint that a run goes on from: its own, and the newest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_shard.checkpoint.background_writes import settle
from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.layout import regular_file
from lightning_shard.checkpoint.files.manifest import Manifest, read_manifest
from lightning_shard.checkpoint.load import OpenCheckpoint, open_checkpoint
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from lightning_shard.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoints from which a run can go on, in plain values that one rank sends to the others."""

    own: tuple[tuple[str, int], ...]
    """Paths of the run's checkpoints with their optimizer steps, the newest first."""

    broken: tuple[str, ...]
    """Why others of the run are no candidates: a file is missing or has another size."""

    others: tuple[str, ...]
    """Names of other runs that have checkpoints there."""


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest checkpoint of a run, opened and checked."""

    checkpoint: OpenCheckpoint | None
    """None where there is no complete one."""

    broken: Sequence[str]
    """Why newer ones of the run were passed over."""

    others: Sequence[str]
    """Names of other runs that have checkpoints there."""


def open_newest(folders: Iterable[str | os.PathLike[str]], run: str) -> Newest:
    """Open the newest checkpoint of ``run`` in ``folders`` whose files all have their checksums. All ranks call it.

    Every file of it is read and hashed once: what is returned is ready to be loaded.
    """
    manifests: dict[str, Manifest] = {}
    found = Ranks.of().first("looking for checkpoints", lambda: find_checkpoints(folders, run, manifests))
    broken = list(found.broken)
    for path, _ in found.own:
        try:
            opened = open_checkpoint(path, manifest=manifests.get(path))
        except CheckpointCorruptError as error:
            broken.append(str(error))
        else:
            return Newest(checkpoint=opened, broken=broken, others=found.others)
    return Newest(checkpoint=None, broken=broken, others=found.others)


def find_checkpoints(
    folders: Iterable[str | os.PathLike[str]], run: str, manifests: dict[str, Manifest] | None = None
) -> Found:
    """The checkpoints of ``run`` that lie directly in one of ``folders``. One rank calls it.

    The run is the one that the manifest names: a checkpoint without a name, or with weights only, is never taken.
    Newest: of the most optimizer steps, and among those the one that was saved last. Checksums are not compared.
    Replacements that were interrupted are finished first, and what this process writes in the background.
    ``manifests``: takes those that were read, by path.
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
            facts = manifest.facts.run
            if facts.get("name") != run:
                others.update([str(facts["name"])] if "name" in facts else [])
                continue
            try:
                for name, entry in manifest.files.items():
                    regular_file(path, name, entry)
            except CheckpointError as error:
                broken.append(str(error))
                continue
            own.append((int(facts["step"]), float(facts["time"]), str(path)))
            if manifests is not None:
                manifests[str(path)] = manifest
    newest_first = tuple((path, step) for step, _, path in sorted(own, reverse=True))
    return Found(own=newest_first, broken=tuple(broken), others=tuple(sorted(others)))
