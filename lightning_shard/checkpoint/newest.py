"""Finding the checkpoint that a run goes on from: its own, and the newest."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_shard.checkpoint.background_writes import settle
from lightning_shard.checkpoint.files.layout import checkpoint_names
from lightning_shard.checkpoint.files.manifest import open_checkpoint_directory
from lightning_shard.checkpoint.load import OpenCheckpoint, open_checkpoint
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from lightning_shard.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Found:
    own: tuple[tuple[str, int], ...]  # Paths of the run's checkpoints with their optimizer steps, the newest first.
    broken: tuple[str, ...]  # Why others of the run are passed over.
    others: tuple[str, ...]  # Names of other runs that have checkpoints there.
    # The first of ``own`` whose files all have their checksums, opened by `open_newest`; None where there is none.
    newest: OpenCheckpoint | None = None


def open_newest(folders: Iterable[str | os.PathLike[str]], run: str) -> Found:
    """Open the newest whole checkpoint of ``run`` in ``folders``: it is ready to be loaded. All ranks call it."""
    found = Ranks.of().first("looking for checkpoints", lambda: find_checkpoints(folders, run))
    broken = list(found.broken)
    for path, _ in found.own:
        try:
            newest = open_checkpoint(path)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            broken.append(str(error))
        else:
            return replace(found, broken=tuple(broken), newest=newest)
    return replace(found, broken=tuple(broken))


def find_checkpoints(folders: Iterable[str | os.PathLike[str]], run: str) -> Found:
    """The checkpoints of ``run`` that lie directly in one of ``folders``. One rank calls it.

    The run is the one that the manifest names: a checkpoint without a name, or with weights only, is never taken.
    Newest: of the most optimizer steps, and among those the one that was saved last. Of the files only the sizes are
    compared. What this process writes in the background is waited for.
    """
    settle()
    own: list[tuple[int, float, str]] = []
    broken: list[str] = []
    others: set[str] = set()
    for path in (path for folder in {Path(f).resolve(): None for f in folders} for path in checkpoint_names(folder)):
        try:
            directory, manifest = open_checkpoint_directory(path)
        except CheckpointError:
            continue  # half-written, or no checkpoint
        facts, sizes = manifest.facts.run, directory.sizes()
        wrong = [name for name, entry in manifest.files.items() if sizes.get(name) != entry.size]
        if facts.get("name") != run:
            others.update([str(facts["name"])] if "name" in facts else [])
        elif wrong:
            broken.append(f"{path} lacks {wrong[0]}, or it has another size than was written")
        else:
            own.append((int(facts["step"]), float(facts["time"]), str(path)))
    newest_first = tuple((path, step) for step, _, path in sorted(own, reverse=True))
    return Found(own=newest_first, broken=tuple(broken), others=tuple(sorted(others)))
