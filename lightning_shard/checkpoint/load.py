"""Opening a portable checkpoint and reading it into live tensors, whatever wrote it and however they are sharded.

A checkpoint is opened once: every rank reads the manifest, ``trainer.pt`` and ``.metadata`` once, and every other file
is compared with its checksum by one rank. What was opened is then loaded; nothing is checked or read again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata

from lightning_shard.checkpoint.background_writes import settle
from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files import manifest as manifests
from lightning_shard.checkpoint.files.contents import Contents, StoredTensor
from lightning_shard.checkpoint.files.layout import (
    EXTRA_STATE,
    METADATA,
    MODEL_PREFIX,
    OPTIMIZER_STATES,
    TRAINER_STATE,
    model_key,
    torch_dtype,
)
from lightning_shard.checkpoint.files.manifest import Manifest, damaged, damaged_files
from lightning_shard.checkpoint.files.metadata import read_metadata
from lightning_shard.checkpoint.files.tensor_files import read_full, read_tensors
from lightning_shard.checkpoint.files.trainer_state import read_trainer_state
from lightning_shard.checkpoint.load_optimizers import (
    OptimizerPlan,
    check_scalars,
    create_slots,
    load_groups,
    plan_optimizers,
    shared_scalars,
)
from lightning_shard.checkpoint.matching import LoadReport, match
from lightning_shard.checkpoint.module_state import live_tensors, load_extra_state, sharded_names
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import Names


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint ``path``; what this process writes in the background is waited for first.

    A replacement that was interrupted is finished. Errors as for
    `lightning_shard.checkpoint.files.manifest.read_manifest`.
    """
    settle()
    commit.recover(Path(path))
    return manifests.read_manifest(path)


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint directory that was opened and checked."""

    path: Path
    manifest: Manifest
    metadata: Metadata

    trainer_state: dict[str, Any]
    """The contents of ``trainer.pt``, tensors on the CPU."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the directory was replaced or removed since it was opened."""
        if manifests.file_identity(self.path) != self.manifest.file_identity:
            raise CheckpointError(f"{self.path} was replaced or removed while it was being loaded: load it again")


def open_checkpoint(path: str | os.PathLike[str], *, manifest: Manifest | None = None) -> OpenCheckpoint:
    """Open the checkpoint directory ``path`` on every rank; all ranks call it.

    All files are compared with their checksums, those with tensors each on one rank. ``manifest``: this rank's, where
    it was read before.

    Raises on every rank the same: CheckpointNotFoundError; CheckpointCorruptError with the names of the files that
    differ; CheckpointError where ranks find different checkpoints at the path.
    """
    ranks, directory = Ranks.of(), Path(path)

    def read() -> OpenCheckpoint:
        known = manifest or read_manifest(directory)
        return OpenCheckpoint(
            path=directory,
            manifest=known,
            metadata=read_metadata(directory, known),
            trainer_state=read_trainer_state(directory, known),
        )

    opened = ranks.agree(f"opening {path}", read)
    digests = ranks.gather(opened.manifest.digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise CheckpointError(
            f"rank {other} finds another checkpoint at {directory} than rank 0: load from a directory that all "
            "machines share"
        )
    damage: dict[str, str] = {}
    for found in ranks.all(
        f"verifying {path}", lambda: damaged_files(directory, opened.manifest, _share(opened.manifest, ranks))
    ):
        damage.update(found)
    if damage:
        raise damaged(directory, damage)
    return opened


def _share(found: Manifest, ranks: Ranks) -> list[str]:
    """The files that this rank hashes: largest first, each to the rank with the fewest bytes."""
    load = [0] * ranks.size
    mine = []
    files = {name: entry for name, entry in found.files.items() if name not in (METADATA, TRAINER_STATE)}
    for name, entry in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        rank = min(range(ranks.size), key=lambda rank: load[rank])
        load[rank] += entry.size + 1
        if rank == ranks.rank:
            mine.append(name)
    return mine


def load_training_state(
    checkpoint: OpenCheckpoint,
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer] = (),
    masters: Mapping[str, LiveTensor] | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load a module (wrapped or not) and its optimizers in place. All ranks call it, with any engine and mesh.

    Without ``optimizers`` only the module is loaded. ``masters``: FQN to what is filled in the place of the module's
    own tensor, which stays. Nothing is changed before the checkpoint is known to fit. Errors as for `load_tensors`.
    """
    ranks, found = Ranks.of(), checkpoint.manifest

    def prepare() -> tuple[Names, list[tuple[str, LiveTensor]], OptimizerPlan, LoadReport]:
        checkpoint.check_unchanged()
        if optimizers and OPTIMIZER_STATES not in checkpoint.trainer_state:
            raise CheckpointMismatchError(f"{checkpoint.path} has no optimizer state: it was saved with weights only")
        names = sharded_names(module)
        live = {model_key(fqn): tensor for fqn, tensor in live_tensors(names, masters).items()}
        aliases = {model_key(alias): model_key(fqn) for alias, fqn in names.aliases.items()}
        stored = {k: entry.shape for k, entry in found.tensors.items() if k.startswith(MODEL_PREFIX)}
        matched = match(_shapes(live), aliases, stored, found.aliases)
        plan = plan_optimizers(
            optimizers, names, found, checkpoint.trainer_state[OPTIMIZER_STATES] if optimizers else []
        )
        report = replace(
            matched,
            missing=matched.missing + plan.missing,
            unexpected=matched.unexpected + plan.unexpected,
            problems=plan.problems,
        ).judge(checkpoint.path, strict)
        return names, [(source, live[key]) for key, source in matched.sources.items()], plan, report

    names, tensors, plan, report = ranks.agree(f"opening {checkpoint.path}", prepare)

    def read_scalars() -> dict[str, Tensor]:
        scalars = shared_scalars(plan)
        read_tensors(checkpoint.path, checkpoint.metadata, scalars.items())
        check_scalars(plan, scalars)
        return scalars

    scalars = ranks.agree(f"reading {checkpoint.path}", read_scalars)

    def read() -> None:
        read_tensors(checkpoint.path, checkpoint.metadata, [*tensors, *create_slots(plan, scalars)])
        load_groups(plan)
        load_extra_state(module, names, checkpoint.trainer_state.get(EXTRA_STATE, {}), strict=strict)
        checkpoint.check_unchanged()

    ranks.agree(f"reading {checkpoint.path}", read)
    return report


def load_tensors(checkpoint: OpenCheckpoint, tensors: Mapping[str, Any], *, strict: bool = True) -> LoadReport:
    """Fill live tensors in place by key, casting where the dtype differs. All ranks call it.

    ``tensors``: key to this rank's plain tensor, DTensor or what stands for one (see
    `lightning_shard.checkpoint.files.tensor_files`); each rank reads the boxes that it needs.

    Raises on every rank the same, before any tensor is changed: CheckpointMismatchError (missing, unexpected and
    reshaped keys together; with ``strict=False`` only reshaped keys, and nothing that matches at all). While tensors
    are read: CheckpointCorruptError, and CheckpointError where the directory was replaced meanwhile.
    """
    ranks, found = Ranks.of(), checkpoint.manifest

    def prepare() -> tuple[dict[str, str], LoadReport]:
        checkpoint.check_unchanged()
        stored = {key: entry.shape for key, entry in found.tensors.items()}
        matched = match(_shapes(tensors), {}, stored, found.aliases)
        return matched.sources, matched.judge(checkpoint.path, strict)

    sources, report = ranks.agree(f"opening {checkpoint.path}", prepare)

    def read() -> None:
        read_tensors(checkpoint.path, checkpoint.metadata, [(key, tensors[name]) for name, key in sources.items()])
        checkpoint.check_unchanged()

    ranks.agree(f"reading {checkpoint.path}", read)
    return report


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise CheckpointError(f"{key} is on the meta device: materialise the model before loading into it")
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def open_portable(path: str | os.PathLike[str]) -> Contents:
    """The checkpoint directory ``path``; its tensors are read, checked against the metadata, when asked for.

    Files with tensors are not compared with their checksums; see `lightning_shard.checkpoint.inspect.verify`. One
    process calls it. Raises CheckpointNotFoundError or CheckpointCorruptError.
    """
    directory = Path(path)
    found = read_manifest(directory)
    metadata = read_metadata(directory, found)

    def stored(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        return StoredTensor(shape=shape, dtype=dtype, read=lambda: read_full(directory, metadata, key))

    return Contents(
        facts=found.facts,
        tensors={k: stored(k, entry.shape, torch_dtype(entry.dtype)) for k, entry in found.tensors.items()},
        aliases=found.aliases,
        slots=found.slots,
        trainer_state=read_trainer_state(directory, found),
    )
