"""What is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.collect import OPTIMIZER_STATES
from lightning_shard.checkpoint.fit import listed
from lightning_shard.checkpoint.forms import is_stock
from lightning_shard.checkpoint.layout import (
    MANIFEST,
    METADATA,
    MODEL_PREFIX,
    TRAINER_STATE,
    FileEntry,
    dtype_name,
    regular_file,
)
from lightning_shard.checkpoint.load import read_manifest
from lightning_shard.checkpoint.metadata import read_metadata
from lightning_shard.checkpoint.stored import Stored
from lightning_shard.checkpoint.trainer_state import read_trainer_state
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from lightning_shard.text import columns

_BLOCK = 1 << 22


def describe(path: str | os.PathLike[str], stored: Stored) -> str:
    """Text for a reader: who wrote the checkpoint at ``path``, its tensors as a table, the ledger, the run's state."""
    state = stored.trainer_state
    versions = ", ".join(f"{name} {version}" for name, version in sorted(stored.versions.items()))
    facts = {
        "checkpoint": f"{path} ({stored.form})",
        "written by": f"{stored.engine} on {stored.world_size} process{'es' * (stored.world_size != 1)}",
        "precision": stored.policy,
        "versions": versions or "not recorded",
        "progress": f"epoch {state.get('epoch', '-')}, step {state.get('global_step', '-')}",
        "optimizers": ", ".join(part["class"] for part in state.get(OPTIMIZER_STATES, [])) or "none: weights only",
        "run's state": ", ".join(sorted(key for key in state if key != OPTIMIZER_STATES)) or "none",
    }
    width = max(map(len, facts)) + 2
    lines = [f"{name + ':':{width}}{text}" for name, text in facts.items()]
    return "\n".join([*lines, "", *_ledger(stored.ledger), *_tensors(stored)])


def _ledger(ledger: Mapping[str, Any]) -> list[str]:
    if not ledger.get("tensors"):
        return ["dtypes as measured: not recorded", ""]
    stages = list(dict.fromkeys(stage for row in ledger["tensors"] for stage in row["dtypes"]))
    table = [["dtypes, as measured", "count", *stages]]
    for row in ledger["tensors"]:
        table.append([row["what"], str(row["count"]), *(row["dtypes"].get(stage, "-") for stage in stages)])
    reduced = ", ".join(ledger.get("reduction", [])) or "no collective"
    return [columns(table), f"gradients reduced in: {reduced}", ""]


def _tensors(stored: Stored) -> list[str]:
    table = [["tensor", "shape", "dtype", "bytes"]]
    for key, tensor in stored.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        table.append([key, shape, dtype_name(tensor.dtype), f"{tensor.nbytes:,}"])
    table += [[alias, f"tied to {key}", "", ""] for alias, key in stored.aliases.items()]
    weights = [tensor for key, tensor in stored.tensors.items() if key.startswith(MODEL_PREFIX)]
    return [
        columns(table),
        "",
        f"{len(weights)} tensors of the model with {sum(math.prod(t.shape) for t in weights):,} elements, "
        f"{len(stored.tensors) - len(weights)} of optimizers; "
        f"{sum(tensor.nbytes for tensor in stored.tensors.values()):,} bytes",
    ]


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Check every file of the checkpoint at ``path``; returns the names of what was checked. One process calls it.

    Of a portable checkpoint each file is compared with its size and checksum, and the metadata and the trainer's
    state are opened as a load does; of a file of ``torch.save`` each record is compared with its own checksum.

    Raises CheckpointCorruptError that names every damaged file, CheckpointNotFoundError, and CheckpointError for a
    form that has no checksums.
    """
    path = Path(path)
    if path.is_file():
        return _verify_archive(path)
    if is_stock(path):
        raise CheckpointError(
            f"{path} is a directory of another library, which has no checksums: convert it, and verify the result"
        )
    manifest = read_manifest(path)
    damage: dict[str, str] = {}
    if not (path / MANIFEST).read_bytes().endswith(b"\n"):  # all that is not under its digest
        damage[MANIFEST] = f"{path / MANIFEST} was cut: its last byte is missing"

    def attempt(name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except CheckpointError as error:
            damage.setdefault(name, str(error))

    for name, entry in sorted(manifest.files.items()):
        attempt(name, functools.partial(_compare, path, name, entry))
    if not damage:  # what opens them says less clearly that they were changed
        attempt(METADATA, lambda: read_metadata(path, manifest))
        attempt(TRAINER_STATE, lambda: read_trainer_state(path, manifest=manifest))
    if damage:
        lines = "\n".join(f"  {text}" for text in damage.values())
        raise CheckpointCorruptError(f"{path} is damaged: {listed(damage)}\n{lines}\nUse another checkpoint.")
    return [*sorted(manifest.files), MANIFEST]


def _compare(directory: Path, name: str, entry: FileEntry) -> None:
    digest = hashlib.sha256()
    try:
        with open(regular_file(directory, name, entry), "rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise CheckpointCorruptError(f"{directory / name} can't be read: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise CheckpointCorruptError(
            f"{directory / name} does not match its checksum: it was damaged or changed after it was written"
        )


def _verify_archive(path: Path) -> list[str]:
    """Every record of a zip file against its CRC-32."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as record:  # raises at the end of a record that differs
                    while record.read(_BLOCK):
                        pass
            return [path.name]
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}. Use another checkpoint.") from error
