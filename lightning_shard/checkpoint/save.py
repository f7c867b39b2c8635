"""Writing a portable checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.flat_shard import FlatTensor
from lightning_shard.checkpoint.layout import MANIFEST, TRAINER_STATE, FileEntry, dtype_name, model_key
from lightning_shard.checkpoint.manifest import Manifest, TensorEntry, library_versions
from lightning_shard.checkpoint.optimizer import optimizer_groups, optimizer_tensors
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.state import extra_state, fqns, model_aliases, model_tensors, reshard
from lightning_shard.checkpoint.stepped import AnyOptimizer
from lightning_shard.checkpoint.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.writer import HashedFile, HashingWriter, TensorSavePlanner
from lightning_shard.errors import CheckpointError

OPTIMIZER_STATES = "optimizer_states"
EXTRA_STATE = "module_extra_state"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says about the run that wrote it."""

    engine: str
    """``"ddp"``, ``"fsdp"`` or ``"deepspeed"``."""

    policy: str
    """The precision policy in words."""

    ledger: Mapping[str, Any] = field(default_factory=dict)
    """The measured dtypes, in plain JSON values."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """Of a training state: ``name`` of the run, ``step`` and ``time``; rank 0's counts."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key of a tied name to the key of its tensor."""


def save_training_state(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer],
    trainer_state: Mapping[str, Any],
    info: CheckpointInfo,
    leave_out: Collection[str] = (),
    masters: Mapping[str, Tensor | FlatTensor] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Save a module (wrapped or not), its optimizers and the rest of the run. All ranks call it.

    ``trainer_state`` counts on rank 0; ``optimizer_states`` in it is replaced by the groups' hyperparameters, and
    ``module_extra_state`` by what the module keeps beyond tensors. ``info.aliases`` is found here. No
    ``optimizers``: weights only. ``leave_out``: FQNs of tensors of the module that the checkpoint is not to have.
    ``masters``: FQN to what is saved as ``model.<fqn>`` in the place of the module's own tensor. Errors as for `save`.
    """
    ranks = Ranks.of(group)

    def collect() -> tuple[dict[str, Tensor | FlatTensor], dict[str, str], dict[str, Any]]:
        reshard(module)
        names = fqns(module)
        skipped = {model_key(fqn) for fqn in leave_out}
        kept = {key: tensor for key, tensor in model_tensors(module, masters).items() if key not in skipped}
        tensors = kept | optimizer_tensors(optimizers, names)
        own: dict[str, Any] = {EXTRA_STATE: extra_state(module)}
        if optimizers:
            own[OPTIMIZER_STATES] = optimizer_groups(optimizers, names)
        return tensors, {alias: key for alias, key in model_aliases(module).items() if key in kept}, own

    tensors, aliases, own = ranks.agree("collecting the state to save", collect)
    info = replace(info, aliases=aliases)
    save(path, tensors=tensors, trainer_state={**trainer_state, **own}, info=info, group=group)


def save(
    path: str | os.PathLike[str],
    *,
    tensors: Mapping[str, Any],
    trainer_state: Mapping[str, Any],
    info: CheckpointInfo,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Save the checkpoint directory ``path``, whole or not at all. All ranks call it; rank 0's ``path`` counts.

    ``tensors``: key to this rank's plain tensor (the whole), DTensor or object with torch's checkpointable protocol;
    each box is written by one of the ranks that have it, in place, without gathering. ``trainer_state`` counts on
    rank 0. A checkpoint that is at the path stays until the new one is whole.

    Raises CheckpointError on every rank alike if anything fails on any of them; the path is as it was then.
    """
    ranks = Ranks.of(group)
    token = commit.new_token()
    encoded: list[bytes] = []

    def begin() -> tuple[str, str]:
        encoded.append(encode_trainer_state(trainer_state))
        target = Path(os.path.abspath(path))
        return str(target), str(commit.begin(target, token))

    target, temporary = map(Path, ranks.first(f"starting to save {path}", begin))
    try:
        writer = HashingWriter(temporary)
        plan, planner, metadata = _plan(ranks, writer, tensors)
        results = _write(ranks, target, writer, plan, planner, encoded)

        def finish() -> None:
            assert metadata is not None
            assert results is not None
            _finish(temporary, target, token, writer, metadata, results, info, ranks.size)

        ranks.first(f"completing {target}", finish)
    except BaseException:
        if ranks.is_first:
            commit.delete_tree(temporary)
        raise


def _plan(
    ranks: Ranks, writer: HashingWriter, tensors: Mapping[str, Any]
) -> tuple[SavePlan, TensorSavePlanner, Metadata | None]:
    """This rank's part, and on rank 0 the metadata of the whole."""
    planner = TensorSavePlanner()
    whole: list[Metadata] = []

    def local() -> SavePlan:
        for key, tensor in tensors.items():
            _check_savable(key, tensor)
        planner.set_up_planner(dict(tensors), None, ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def decide(plans: list[SavePlan]) -> list[SavePlan]:
        parts, metadata = planner.create_global_plan(plans)
        whole.append(metadata)
        return writer.prepare_global_plan(parts)

    part = ranks.exchange("planning the save", local, decide)
    return planner.finish_plan(part), planner, whole[0] if whole else None


def _check_savable(key: str, tensor: Any) -> None:
    if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
        what = "on the meta device and has no values" if tensor.is_meta else f"a {tensor.layout} tensor"
        raise CheckpointError(f"{key} is {what}; only dense tensors with values can be saved")


_Written = tuple[list[WriteResult], dict[str, FileEntry]]


def _write(
    ranks: Ranks,
    target: Path,
    writer: HashingWriter,
    plan: SavePlan,
    planner: TensorSavePlanner,
    encoded: list[bytes],
) -> list[_Written] | None:
    """Write this rank's files; on rank 0 what all ranks wrote."""

    def write() -> _Written:
        results = writer.write_data(plan, planner).wait()
        if ranks.is_first:
            with HashedFile(writer.directory / TRAINER_STATE) as stream:
                stream.write(encoded[0])
            writer.files[TRAINER_STATE] = stream.entry()
        return results, dict(writer.files)

    gathered: list[list[_Written]] = []

    def keep(written: list[_Written]) -> list[None]:
        gathered.append(written)
        return [None] * ranks.size

    ranks.exchange(f"writing {target}", write, keep)
    return gathered[0] if gathered else None


def _finish(
    temporary: Path,
    target: Path,
    token: str,
    writer: HashingWriter,
    metadata: Metadata,
    results: list[_Written],
    info: CheckpointInfo,
    world_size: int,
) -> None:
    """On rank 0: the metadata, last the manifest, then all of it in place."""
    writer.finish(metadata, [part for part, _ in results])
    files = {name: entry for _, written in results for name, entry in written.items()} | writer.files
    for name, entry in files.items():
        _check_arrived(temporary / name, entry)
    entries = {
        key: TensorEntry(shape=tuple(entry.size), dtype=dtype_name(entry.properties.dtype))  # type: ignore[union-attr]
        for key, entry in metadata.state_dict_metadata.items()
    }
    lost = sorted(key for key in info.aliases.values() if key not in entries)
    if lost:
        raise CheckpointError(f"aliases name {', '.join(lost[:5])}, which are not among the tensors to save")
    manifest = Manifest(
        engine=info.engine,
        policy=info.policy,
        ledger=info.ledger,
        world_size=world_size,
        tensors=entries,
        aliases=info.aliases,
        files=files,
        versions=library_versions(),
        run=info.run,
    )
    with HashedFile(temporary / MANIFEST) as stream:
        stream.write(manifest.to_json().encode())
    commit.publish(temporary, target, token)


def _check_arrived(path: Path, entry: FileEntry) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != entry.size:
        seen = "does not exist" if size is None else f"has {size} bytes"
        raise CheckpointError(
            f"a rank wrote {entry.size} bytes to {path}, but on rank 0 it {seen}: save to a directory that all "
            "machines share"
        )
