"""Writing a portable checkpoint: all ranks agree on who writes what, and write it.

Where the values come from, and over which group the ranks that write them speak, is not said at the beginning: a save
in the background writes copies, over a group of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.collect import CheckpointInfo, State, training_state
from lightning_shard.checkpoint.layout import MANIFEST, METADATA, TRAINER_STATE, FileEntry, dtype_name
from lightning_shard.checkpoint.manifest import Manifest, TensorEntry, library_versions
from lightning_shard.checkpoint.plan import Plan, Plans, Values, live_values
from lightning_shard.checkpoint.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.writer import Written, encode_metadata, write_boxes, write_file
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor


def save_training_state(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer],
    trainer_state: Mapping[str, Any],
    info: CheckpointInfo,
    leave_out: Collection[str] = (),
    masters: Mapping[str, LiveTensor] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Save a module (wrapped or not), its optimizers and the rest of the run. All ranks call it.

    Arguments as for `training_state`. Errors as for `save`.
    """

    def collect() -> State:
        return training_state(
            module=module,
            optimizers=optimizers,
            trainer_state=trainer_state,
            info=info,
            leave_out=leave_out,
            masters=masters,
        )

    _save(Ranks.of(group), path, collect)


def save(
    path: str | os.PathLike[str],
    *,
    tensors: Mapping[str, Any],
    trainer_state: Mapping[str, Any],
    info: CheckpointInfo,
    first_counts: Collection[str] = (),
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Save the checkpoint directory ``path``, whole or not at all. All ranks call it; rank 0's ``path`` counts.

    Arguments as for `State`. Each box of a tensor is written by one of the ranks that have it, in place, without
    gathering. A checkpoint that is at the path stays until the new one is whole.

    Raises CheckpointError on every rank alike if anything fails on any of them; the path is as it was then.
    """
    state = State(tensors=tensors, trainer_state=trainer_state, info=info, first_counts=first_counts)
    _save(Ranks.of(group), path, lambda: state)


def _save(ranks: Ranks, path: str | os.PathLike[str], collect: Callable[[], State]) -> None:
    begun, state = begin(ranks, path, collect, Plans())
    begun.finish(ranks, live_values(state.tensors))


def begin(
    ranks: Ranks, path: str | os.PathLike[str], collect: Callable[[], State], plans: Plans
) -> tuple[Begun, State]:
    """Everything of a save but its values: all ranks agree on the plan, and nothing of the rest can change any more.

    All ranks call it; rank 0's ``path`` counts. ``collect`` is called on each rank, without communication. Raises as
    `save` does.
    """
    token = commit.new_token()
    collected: list[State] = []
    encoded: list[bytes] = []

    def look() -> bool:
        collected.append(collect())
        return plans.know(collected[0].tensors, collected[0].first_counts)

    def decide(known: list[bool]) -> list[tuple[str, str, bool]]:
        encoded.append(encode_trainer_state(collected[0].trainer_state))
        target = Path(os.path.abspath(path))
        return [(str(target), str(commit.begin(target, token)), all(known))] * ranks.size

    target, temporary, known = ranks.exchange(f"starting to save {path}", look, decide)
    (state,) = collected
    try:
        plan = plans.agreed(ranks, known=known)
    except BaseException:
        if ranks.is_first:
            commit.delete_tree(Path(temporary))
        raise
    begun = Begun(
        target=Path(target),
        temporary=Path(temporary),
        token=token,
        plan=plan,
        trainer_state=encoded[0] if encoded else b"",
        info=state.info,
    )
    return begun, state


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A save whose values are still to be written; one of `finish` and `abandon` is called."""

    target: Path
    """Where the checkpoint is to be."""

    temporary: Path
    token: str
    plan: Plan
    trainer_state: bytes
    """The contents of ``trainer.pt``, on rank 0."""

    info: CheckpointInfo

    def finish(self, ranks: Ranks, values: Values) -> None:
        """Write the values and put the checkpoint in place. All ranks call it.

        ``ranks``: the same processes as at the beginning, over the same or another group. Raises as `save` does.
        """
        gathered: list[list[Written]] = []

        def keep(written: list[Written]) -> list[None]:
            gathered.append(written)
            return [None] * ranks.size

        try:
            ranks.exchange(f"writing {self.target}", lambda: self._write(ranks.rank, values), keep)
            ranks.first(f"completing {self.target}", lambda: self._complete(gathered[0]))
        except BaseException:
            if ranks.is_first:
                commit.delete_tree(self.temporary)
            raise

    def _write(self, rank: int, values: Values) -> Written:
        """This rank's files."""
        written = write_boxes(self.temporary, rank, self.plan.mine, values)
        if rank == 0:
            entry = write_file(self.temporary / TRAINER_STATE, self.trainer_state)
            return replace(written, files={**written.files, TRAINER_STATE: entry})
        return written

    def _complete(self, written: Sequence[Written]) -> None:
        """On rank 0: the metadata, last the manifest, then all of it in place."""
        assert self.plan.whole is not None
        files = {name: entry for part in written for name, entry in part.files.items()}
        files[METADATA] = write_file(self.temporary / METADATA, encode_metadata(self.plan.whole, written))
        for name, entry in files.items():
            _check_arrived(self.temporary / name, entry)
        tensors = {
            key: TensorEntry(shape=tuple(entry.size), dtype=dtype_name(entry.properties.dtype))
            for key, entry in self.plan.whole.tensors.items()
        }
        lost = sorted(key for key in self.info.aliases.values() if key not in tensors)
        if lost:
            raise CheckpointError(f"aliases name {', '.join(lost[:5])}, which are not among the tensors to save")
        manifest = Manifest(
            engine=self.info.engine,
            policy=self.info.policy,
            ledger=self.info.ledger,
            world_size=len(written),
            tensors=tensors,
            aliases=self.info.aliases,
            files=files,
            versions=library_versions(),
            run=self.info.run,
        )
        write_file(self.temporary / MANIFEST, manifest.to_json().encode())
        commit.publish(self.temporary, self.target, self.token)


def _check_arrived(path: Path, entry: FileEntry) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != entry.size:
        seen = "does not exist" if size is None else f"has {size} bytes"
        raise CheckpointError(
            f"a rank wrote {entry.size} bytes to {path}, but on rank 0 it {seen}: save to a directory that all "
            "machines share"
        )
