"""Reading a portable checkpoint into live tensors, whatever wrote it and however they are cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint import manifest as manifests
from lightning_shard.checkpoint.collect import EXTRA_STATE, OPTIMIZER_STATES
from lightning_shard.checkpoint.fit import Fit, LoadReport, compare, listed
from lightning_shard.checkpoint.layout import MODEL_PREFIX, OPTIMIZER_PREFIX, regular_file
from lightning_shard.checkpoint.manifest import Manifest
from lightning_shard.checkpoint.metadata import add_names, read_metadata
from lightning_shard.checkpoint.optimizer_fill import check_scalars, create_slots, load_groups, shared_scalars
from lightning_shard.checkpoint.optimizer_load import OptimizerPlan, plan_optimizers
from lightning_shard.checkpoint.reader import CheckedReader, TensorLoadPlanner
from lightning_shard.checkpoint.state import load_extra_state, model_aliases, model_tensors, reshard
from lightning_shard.checkpoint.trainer_state import read_trainer_state
from lightning_shard.checkpoint.under_way import settle
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import fqns

_BLOCK = 1 << 22


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint ``path``; what this process writes in the background is waited for first.

    A replacement that was interrupted is finished. Errors as for
    `lightning_shard.checkpoint.manifest.read_manifest`.
    """
    settle()
    commit.recover(Path(path))
    return manifests.read_manifest(path)


def open_checkpoint(
    path: str | os.PathLike[str], *, group: torch.distributed.ProcessGroup | None = None
) -> tuple[Manifest, dict[str, Any]]:
    """The manifest and ``trainer.pt``'s contents (tensors on the CPU), read on every rank; all ranks call it.

    Raises CheckpointNotFoundError or CheckpointCorruptError on every rank alike.
    """

    def read() -> tuple[Manifest, dict[str, Any]]:
        manifest = read_manifest(path)
        return manifest, read_trainer_state(path, manifest=manifest)

    return Ranks.of(group).agree(f"opening {path}", read)


def verify_files(path: str | os.PathLike[str], *, group: torch.distributed.ProcessGroup | None = None) -> Manifest:
    """Compare every file of the checkpoint with its checksum, each on one rank; all ranks call it.

    Returns the manifest. Raises CheckpointCorruptError on every rank with the names of the files that differ.
    """
    ranks = Ranks.of(group)
    manifest = ranks.agree(f"opening {path}", lambda: read_manifest(path))
    _verify(ranks, Path(path), manifest)
    return manifest


def load_training_state(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer] = (),
    masters: Mapping[str, LiveTensor] | None = None,
    strict: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
    verify: bool = True,
) -> tuple[dict[str, Any], LoadReport]:
    """Load a module (wrapped or not) and its optimizers in place and return the rest of the checkpoint.

    All ranks call it, with any engine, mesh and number of ranks. Without ``optimizers`` only the module is loaded.
    ``masters``: FQN to what is filled from ``model.<fqn>`` in the place of the module's own tensor, which stays.
    Nothing is changed before the checkpoint is known to fit. The returned dictionary is ``trainer.pt``'s, the
    tensors in it on the CPU. Errors as for `load_tensors`, on every rank alike.
    """
    ranks = Ranks.of(group)
    directory = Path(path)

    def prepare() -> tuple[Manifest, dict[str, Any], dict[str, Any], OptimizerPlan, Fit, LoadReport]:
        manifest = read_manifest(directory)
        state = read_trainer_state(directory, manifest=manifest)
        if optimizers and OPTIMIZER_STATES not in state:
            raise CheckpointMismatchError(f"{directory} has no optimizer state: it was saved with weights only")
        reshard(module)
        tensors = model_tensors(module, masters)
        saved = state[OPTIMIZER_STATES] if optimizers else []
        plan = plan_optimizers(optimizers, fqns(module), manifest, saved)
        fit = compare(manifest, _shapes(tensors), model_aliases(module), (MODEL_PREFIX,))
        whole = Fit(fit.sources, fit.missing + plan.missing, fit.unexpected + plan.unexpected, fit.reshaped)
        return manifest, state, tensors, plan, fit, whole.judged(directory, strict, plan.problems)

    manifest, state, tensors, plan, fit, report = ranks.agree(f"opening {path}", prepare)
    metadata = _check_files(ranks, directory, manifest, verify)

    def slot_sources(asked: Mapping[str, Any]) -> dict[str, str]:
        return compare(manifest, _shapes(asked), model_aliases(module), (OPTIMIZER_PREFIX,)).sources

    def read_scalars() -> dict[str, Tensor]:
        scalars = shared_scalars(plan)
        _read(directory, metadata, scalars, slot_sources(scalars))
        check_scalars(plan, scalars)
        return scalars

    scalars = ranks.agree(f"reading {path}", read_scalars)

    def read() -> None:
        slots = create_slots(plan, scalars)
        _read(directory, metadata, {**tensors, **slots}, fit.sources | slot_sources(slots))
        load_groups(plan)
        load_extra_state(module, state.get(EXTRA_STATE, {}), strict=strict)

    ranks.agree(f"reading {path}", read)
    return state, report


def load_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    strict: bool = True,
    aliases: Mapping[str, str] | None = None,
    prefixes: tuple[str, ...] = (MODEL_PREFIX, OPTIMIZER_PREFIX),
    group: torch.distributed.ProcessGroup | None = None,
    verify: bool = True,
) -> LoadReport:
    """Fill live tensors in place from the checkpoint ``path``, casting where the dtype differs. All ranks call it.

    ``tensors``: key to this rank's plain tensor, DTensor or object with torch's checkpointable protocol (with a
    ``shape`` and ``size()``); each rank reads the boxes that it needs. ``aliases``: further keys of a live tied
    tensor to its key here. ``prefixes``: which of the checkpoint's keys are expected to be asked for. ``verify``:
    compare all files with their checksums first, each on one rank.

    Raises on every rank alike, before any tensor is changed: CheckpointNotFoundError, CheckpointCorruptError (file
    named), CheckpointMismatchError (missing, unexpected and reshaped keys together; with ``strict=False`` only
    reshaped keys, and nothing that matches at all).
    """
    ranks = Ranks.of(group)
    directory = Path(path)

    def prepare() -> tuple[Manifest, Fit, LoadReport]:
        manifest = read_manifest(directory)
        fit = compare(manifest, _shapes(tensors), aliases or {}, prefixes)
        return manifest, fit, fit.judged(directory, strict, [])

    manifest, fit, report = ranks.agree(f"opening {path}", prepare)
    metadata = _check_files(ranks, directory, manifest, verify)
    ranks.agree(f"reading {path}", lambda: _read(directory, metadata, tensors, fit.sources))
    return report


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise CheckpointError(f"{key} is on the meta device: materialise the model before loading into it")
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def _read(directory: Path, metadata: Metadata, tensors: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Fill ``tensors``, each from the key in ``sources``; those without one stay."""
    add_names(metadata, {key: stored for key, stored in sources.items() if key != stored})
    planner = TensorLoadPlanner()
    planner.set_up_planner({key: tensors[key] for key in sources}, metadata)
    with torch.no_grad():
        CheckedReader(directory, metadata).read_data(planner.create_local_plan(), planner).wait()


def _check_files(ranks: Ranks, directory: Path, manifest: Manifest, verify: bool) -> Metadata:
    """Before anything is changed: all ranks see the same checkpoint, its files are as they were written."""
    digests = ranks.all("comparing checkpoints", lambda: manifest.digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise CheckpointError(
            f"rank {other} finds another checkpoint at {directory} than rank 0: load from a directory that all "
            "machines share"
        )
    metadata = ranks.agree(f"checking {directory}", lambda: read_metadata(directory, manifest))
    if verify:
        _verify(ranks, directory, manifest)
    return metadata


def _verify(ranks: Ranks, directory: Path, manifest: Manifest) -> None:
    mine = _share(manifest, ranks)

    def differing() -> list[str]:
        return [
            name
            for name in mine
            if _sha256(regular_file(directory, name, manifest.files[name])) != manifest.files[name].sha256
        ]

    bad = sorted(name for part in ranks.all(f"verifying {directory}", differing) for name in part)
    if bad:
        raise CheckpointCorruptError(
            f"{directory}: {listed(bad)} does not match its checksum: it was damaged or changed after it was "
            "written. Use another checkpoint."
        )


def _share(manifest: Manifest, ranks: Ranks) -> list[str]:
    """The files that this rank hashes: largest first, each to the rank with the fewest bytes."""
    load = [0] * ranks.size
    mine = []
    for name, entry in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
        rank = min(range(ranks.size), key=lambda rank: load[rank])
        load[rank] += entry.size + 1
        if rank == ranks.rank:
            mine.append(name)
    return mine


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
