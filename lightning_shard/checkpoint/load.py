"""Reading a portable checkpoint into live tensors, whatever wrote it and however they are cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata
from torch.optim import Optimizer

from lightning_shard.checkpoint import commit, layout
from lightning_shard.checkpoint.layout import MODEL_PREFIX, OPTIMIZER_PREFIX, Manifest, regular_file
from lightning_shard.checkpoint.metadata import add_names, alias_keys, read_metadata
from lightning_shard.checkpoint.optimizer import OptimizerPlan, create_slots, load_groups, plan_optimizers
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.save import EXTRA_STATE, OPTIMIZER_STATES
from lightning_shard.checkpoint.state import fqns, load_extra_state, model_aliases, model_tensors, reshard
from lightning_shard.checkpoint.storage import CheckedReader, TensorLoadPlanner
from lightning_shard.checkpoint.trainer_state import read_trainer_state
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

_SHOWN = 20
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Keys that a load with ``strict=False`` left alone; both empty after a strict one."""

    missing: Sequence[str] = field(default=())
    """Asked for, not in the checkpoint: these tensors kept their values."""

    unexpected: Sequence[str] = field(default=())
    """In the checkpoint, not asked for."""


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint ``path``; a replacement that was interrupted is finished first.

    Errors as for `lightning_shard.checkpoint.layout.read_manifest`.
    """
    commit.recover(Path(path))
    return layout.read_manifest(path)


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
    optimizers: Sequence[Optimizer] = (),
    strict: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
    verify: bool = True,
) -> tuple[dict[str, Any], LoadReport]:
    """Load a module (wrapped or not) and its optimizers in place and return the rest of the checkpoint.

    All ranks call it, with any engine, mesh and number of ranks. Without ``optimizers`` only the module is loaded.
    Nothing is changed before the checkpoint is known to fit. The returned dictionary is ``trainer.pt``'s, the
    tensors in it on the CPU. Errors as for `load_tensors`, on every rank alike.
    """
    ranks = Ranks.of(group)

    def prepare() -> tuple[Manifest, dict[str, Any], OptimizerPlan | None]:
        manifest = read_manifest(path)
        state = read_trainer_state(path, manifest=manifest)
        if not optimizers:
            return manifest, state, None
        if OPTIMIZER_STATES not in state:
            raise CheckpointMismatchError(f"{path} has no optimizer state: it was saved with weights only")
        return manifest, state, plan_optimizers(optimizers, fqns(module), manifest, state[OPTIMIZER_STATES])

    def fit() -> LoadReport:
        shapes = {key: tuple(tensor.shape) for key, tensor in model_tensors(module).items()}
        fit = _compare(manifest, shapes, aliases, (MODEL_PREFIX,))
        if plan is not None:
            fit = _Fit(fit.sources, fit.missing + plan.missing, fit.unexpected + plan.unexpected, fit.reshaped)
        return fit.judged(path, strict, plan.problems if plan else [])

    reshard(module)
    manifest, state, plan = ranks.agree(f"opening {path}", prepare)
    aliases = model_aliases(module)
    report = ranks.agree(f"comparing {path} with the model", fit)
    tensors = dict(model_tensors(module))
    if plan is not None:
        tensors |= ranks.agree("creating the optimizers' state", lambda: create_slots(optimizers, plan))
    prefixes = (MODEL_PREFIX, OPTIMIZER_PREFIX) if optimizers else (MODEL_PREFIX,)
    load_tensors(path, tensors, strict=False, aliases=aliases, prefixes=prefixes, group=group, verify=verify)
    if plan is not None:
        load_groups(plan)
    load_extra_state(module, state.get(EXTRA_STATE, {}), strict=strict)
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

    def prepare() -> tuple[Manifest, Metadata, _Fit, LoadReport]:
        manifest = read_manifest(directory)
        for key, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                raise CheckpointError(f"{key} is on the meta device: materialise the model before loading into it")
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        fit = _compare(manifest, shapes, aliases or {}, prefixes)
        report = fit.judged(directory, strict, [])
        metadata = read_metadata(directory, manifest)
        add_names(metadata, {key: stored for key, stored in fit.sources.items() if key != stored})
        return manifest, metadata, fit, report

    def read() -> None:
        planner = TensorLoadPlanner()
        planner.set_up_planner({key: tensors[key] for key in fit.sources}, metadata)
        with torch.no_grad():
            CheckedReader(directory, metadata).read_data(planner.create_local_plan(), planner).wait()

    manifest, metadata, fit, report = ranks.agree(f"opening {path}", prepare)
    _same_everywhere(ranks, directory, manifest)
    if verify:
        _verify(ranks, directory, manifest)
    ranks.agree(f"reading {path}", read)
    return report


@dataclass(frozen=True)
class _Fit:
    sources: dict[str, str]
    """Key asked for to the key that it is stored under."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def judged(self, path: str | os.PathLike[str], strict: bool, problems: list[str]) -> LoadReport:
        """What to report of a fit that is good enough; CheckpointMismatchError of one that is not."""
        if not self.sources and (self.missing or self.unexpected):
            raise CheckpointMismatchError(
                f"nothing in {path} matches the model by name. It asks for {_listed(self.missing)}; the checkpoint has "
                f"{_listed(self.unexpected)}"
            )
        if self.reshaped or problems or (strict and (self.missing or self.unexpected)):
            lines = [f"{path} does not fit:"]
            for kind, keys in (
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
                ("of another shape", self.reshaped),
            ):
                if keys:
                    lines.append(f"  {kind} ({len(keys)}): {_listed(keys)}")
            lines += [f"  {problem}" for problem in problems[:_SHOWN]]
            if not self.reshaped and not problems:
                lines.append("  strict=False loads what matches.")
            raise CheckpointMismatchError("\n".join(lines))
        return LoadReport(missing=self.missing, unexpected=self.unexpected)


def _compare(
    manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], prefixes: tuple[str, ...]
) -> _Fit:
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
    return _Fit(sources, missing, unexpected, reshaped)


def _listed(keys: Iterable[str]) -> str:
    keys = sorted(keys)
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (", ".join(keys[:_SHOWN]) or "nothing") + more


def _same_everywhere(ranks: Ranks, directory: Path, manifest: Manifest) -> None:
    digests = ranks.all("comparing checkpoints", lambda: manifest.digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise CheckpointError(
            f"rank {other} finds another checkpoint at {directory} than rank 0: load from a directory that all "
            "machines share"
        )


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
            f"{directory}: {_listed(bad)} does not match its checksum: it was damaged or changed after it was "
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
