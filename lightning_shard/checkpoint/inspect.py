"""Detecting the form of a checkpoint, and opening, describing and verifying it."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.boxes import read_boxes
from lightning_shard.checkpoint.files.commit import wait_for_background_saves
from lightning_shard.checkpoint.files.layout import MANIFEST, OPTIMIZER_STATES, StrPath
from lightning_shard.checkpoint.files.location import Location, StorePath, location
from lightning_shard.checkpoint.files.manifest import Contents, damaged, open_checkpoint_directory, other_content
from lightning_shard.checkpoint.files.trainer_state import read_trainer_state
from lightning_shard.checkpoint.foreign import sharded_folders
from lightning_shard.checkpoint.foreign.lightning_file import ModuleNames, open_full
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError
from lightning_shard.text import columns


def is_foreign(path: StrPath) -> bool:
    """True if ``path`` looks like another library's checkpoint or the ``full`` form. It may be unreadable."""
    where = location(path)
    wait_for_background_saves()
    if isinstance(where, StorePath):
        return False  # stores have portable directories alone
    with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
        if not where.is_dir():
            return where.is_file()
        return not (where / MANIFEST).exists() and (
            sharded_folders.is_stock_fsdp(where) or sharded_folders.deepspeed_folder(where) is not None
        )
    return False


def open_any(
    path: StrPath,
    names: Callable[[], ModuleNames] | None = None,
    *,
    optimizers: Literal["named", "numbered", "none"] = "named",
) -> Contents:
    """Open the checkpoint at ``path``, of any form. No tensor of the model or an optimizer is read yet.

    ``names`` returns the live module's names, for forms that number an optimizer's parameters. Without them
    ``optimizers`` says: "named" refuses such numbers, "numbered" keeps them, "none" leaves out all optimizer state.
    CheckpointError.
    """
    if not is_foreign(path):
        stored = open_portable(path)
    elif (path := Path(path)).is_file():
        if path.suffix == ".safetensors":
            raise CheckpointNotFoundError(f"{path} is not a checkpoint.{other_content(path)}")
        stored = open_full(path, names() if names is not None else None, number=optimizers != "named")
    else:
        stored = (
            sharded_folders.open_stock_fsdp(path)
            if sharded_folders.is_stock_fsdp(path)
            else sharded_folders.open_deepspeed(path)
        )
    if optimizers != "none":
        return stored
    tensors = {key: tensor for key, tensor in stored.tensors.items() if key not in stored.slots}
    state = {key: value for key, value in stored.trainer_state.items() if key != OPTIMIZER_STATES}
    return replace(stored, tensors=tensors, slots={}, trainer_state=state)


def describe(path: layout.StrPath, stored: Contents) -> str:
    """Describe the checkpoint at ``path`` as text: its writer, the ledger, a table of tensors, the run's state."""
    with layout.damaged_if(f"{path} has a state of another form"):
        state, facts = stored.trainer_state, stored.facts
        versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
        lines = {
            "checkpoint": f"{path} ({stored.form})",
            "written by": f"{facts.engine} on {facts.world_size} process{'es' * (facts.world_size != 1)}",
            "precision": facts.policy,
            "versions": versions or "not recorded",
            "progress": f"epoch {state.get('epoch', '-')}, step {state.get('global_step', '-')}",
            "optimizers": ", ".join(part["class"] for part in state.get(layout.OPTIMIZER_STATES, []))
            or "none: weights only",
            "left out": f"{len(facts.frozen)} frozen tensors, digests kept" if facts.frozen else "nothing",
            "run's state": ", ".join(sorted(key for key in state if key != layout.OPTIMIZER_STATES)) or "none",
        }
        head = columns([[f"{name}:", text] for name, text in lines.items()])
        return "\n".join([head, "", *_ledger(facts.ledger), *_tensors(stored)])


def _ledger(ledger: Mapping[str, Any]) -> list[str]:
    if not ledger.get("tensors"):
        return ["dtypes as measured: not recorded", ""]
    stages = list(dict.fromkeys(stage for row in ledger["tensors"] for stage in row["dtypes"]))
    table = [["dtypes, as measured", "count", *stages]]
    for row in ledger["tensors"]:
        table.append([row["what"], str(row["count"]), *(row["dtypes"].get(stage, "-") for stage in stages)])
    reduced = ", ".join(ledger.get("reduction", [])) or "no collective"
    return [columns(table), f"gradients reduced in: {reduced}", ""]


def _tensors(stored: Contents) -> list[str]:
    table = [["tensor", "shape", "dtype", "bytes"]]
    for key, tensor in stored.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        table.append([key, shape, layout.dtype_name(tensor.dtype), f"{tensor.nbytes:,}"])
    table += [[alias, f"tied to {key}", "", ""] for alias, key in stored.aliases.items()]
    weights = layout.without_prefix(layout.MODEL_PREFIX, stored.tensors).values()
    averages = layout.without_prefix(layout.AVERAGE_PREFIX, stored.tensors)
    total = (
        f"{len(weights)} tensors of the model with {sum(math.prod(t.shape) for t in weights):,} elements, "
        f"{len(stored.slots)} of optimizers, {len(averages)} averages; "
        f"{sum(tensor.nbytes for tensor in stored.tensors.values()):,} bytes"
    )
    return [columns(table), "", total]


def verify(path: layout.StrPath) -> list[str]:
    """Check every file of the checkpoint at ``path`` and return their names. One process calls it.

    Each file of a portable checkpoint is compared with its size and checksum, each record of a file of ``torch.save``
    with its CRC-32. Files that a load parses are parsed. CheckpointCorruptError names every damaged file.
    CheckpointNotFoundError. CheckpointError: a form that has no checksums.
    """
    foreign, where = is_foreign(path), location(path)
    if isinstance(where, Path) and where.is_file():
        open_full(where, number=True)  # compares every record with its CRC-32
        return [where.name]
    if foreign:
        raise CheckpointError(
            f"{path} is a directory of another library, which has no checksums: convert it, and verify the result"
        )
    return _verify_directory(where)


@layout.again_if_replaced
def _verify_directory(where: Location) -> list[str]:
    directory, manifest = open_checkpoint_directory(where)
    damage = directory.damaged(manifest.files, manifest.files)
    if damage:
        raise damaged(where, damage)
    if layout.TRAINER_STATE in manifest.files:  # Hugging Face's layout has neither
        read_boxes(directory, manifest)
        read_trainer_state(directory, manifest)
    return [*sorted(manifest.files), layout.MANIFEST]
