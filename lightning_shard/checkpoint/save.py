"""Saving a portable checkpoint: all ranks agree which rank writes which box, then write.

A save has two halves: making a `PendingSave`, and `PendingSave.write`. The second gets the source of the values and the
ranks' group, because a save in the background writes copies and communicates over a group of its own.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.location import AnyPath, Location, common_to_all, location, refuse_url
from lightning_shard.checkpoint.files.manifest import Contents, Facts, Manifest, TensorEntry, library_versions
from lightning_shard.checkpoint.files.tensor_files import ReadBox, WrittenFiles, describe_boxes, write_boxes, write_file
from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.foreign.hugging_face_folders import Skeleton, write_hugging_face
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.checkpoint.optimizer_state import extra_state, live_tensors, optimizer_states, sharded_names
from lightning_shard.checkpoint.save_plan import SavePlanner, digests, live_values
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.text import listed


def digests_of_frozen(
    module: nn.Module, masters: Mapping[str, LiveTensor], averages: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return FQN to digest of each frozen parameter whose average, if it has one, equals it. All ranks call it.
    ``masters``, ``averages``: as in `training_state`.
    """
    names = sharded_names(module)
    frozen = {fqn for fqn, t in names.tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    weights = {fqn: tensor for fqn, tensor in live_tensors(names, masters).items() if fqn in frozen}
    averaged = {fqn: average for fqn, average in (averages or {}).items() if fqn in weights}
    found, other = (digests(tensors) if tensors else {} for tensors in (weights, averaged))
    return {fqn: digest for fqn, digest in found.items() if other.get(fqn, digest) == digest}


def training_state(
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer],
    trainer_state: Mapping[str, Any],
    facts: Facts,
    own_state: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
    masters: Mapping[str, LiveTensor] | None = None,
    averages: Mapping[str, Any] | None = None,
) -> Contents:
    """Collect the state of a module (wrapped or not), its optimizers and the rest of the run. No communication.

    ``trainer_state`` gets the hyperparameters of the optimizers' groups and the module's extra state. ``own_state``:
    state of this rank alone. No ``optimizers``: weights only. ``leave_out``: FQNs that the checkpoint omits.
    ``masters``, ``averages``: FQN to the tensor that is saved instead of the module's own, and to its average. Buffers
    are the same on all ranks.
    """
    names = sharded_names(module)
    live = {fqn: tensor for fqn, tensor in live_tensors(names, masters).items() if fqn not in leave_out}
    slots, described = optimizer_states(optimizers, names)
    own: dict[str, Any] = {layout.EXTRA_STATE: extra_state(module, names)}
    if optimizers:
        own[layout.OPTIMIZER_STATES] = described
    return Contents.of(
        weights=live,
        aliases={alias: fqn for alias, fqn in names.aliases.items() if fqn in live},
        slots=slots,
        averages={fqn: average for fqn, average in (averages or {}).items() if fqn in live},
        trainer_state={**trainer_state, **own},
        own_state=own_state,
        facts=facts,
    )


def write_portable(path: AnyPath, contents: Contents) -> None:
    """Write ``contents``, the same on all ranks, as the directory ``path``, like `PendingSave`. All ranks call it."""
    ranks = Ranks.of()
    PendingSave(ranks, path, lambda: contents, SavePlanner()).write(ranks, live_values(contents.tensors))


class PendingSave:
    """A planned save, complete but for the values, which `write` writes. The rest can't change any more.

    The save is complete or not made at all. Each box is written by one of the ranks that have it.
    """

    def __init__(
        self,
        ranks: Ranks,
        path: AnyPath,
        collect: Callable[[], Contents],
        planner: SavePlanner,
        convert: Callable[[Ranks], object] = lambda ranks: None,
    ) -> None:
        """Agree with all ranks on the plan. All ranks call it. Rank 0's ``path`` counts.

        ``collect`` returns the rank's contents without communication. ``convert`` turns the directory into another
        form, on all ranks. CheckpointError, the same on every rank, if any rank fails. An older checkpoint stays then.
        """
        self._token, self._convert = layout.new_token(), convert
        # Rank 0's ``trainer.pt``, and the state that this rank appends to its boxes.
        self._trainer_state = self._own_state = b""

        def collect_contents() -> bool:
            self.contents = collect()
            if self.contents.own_state is not None:
                self._own_state = encode_trainer_state(self.contents.own_state)
            return planner.is_unchanged(self.contents.tensors, self.contents.slots)

        def make_folder(unchanged: list[bool]) -> list[tuple[Location, Location, bool]]:
            self._trainer_state = encode_trainer_state(self.contents.whole_state)
            target = location(path).absolute()
            return [(target, commit.create_temporary(target, self._token), all(unchanged))] * ranks.size

        started = ranks.exchange(f"starting to save {path}", collect_contents, make_folder)
        self.target, self._temporary, is_unchanged = started
        with commit.deleted_on_failure(self._temporary, here=ranks.is_first):
            self.plan = planner.agree_on_plan(ranks, is_unchanged=is_unchanged)

    def write(self, ranks: Ranks, values: ReadBox) -> None:
        """Write the values and put the checkpoint in place. All of ``ranks`` call it. Errors as above."""
        with commit.deleted_on_failure(self._temporary, here=ranks.is_first):
            boxes = self.plan.mine
            mine = partial(write_boxes, self._temporary, ranks.rank, boxes, values, self._own_state)
            written = ranks.collect(f"writing {self.target}", mine)
            ranks.first(f"completing {self.target}", lambda: self._complete_directory(written))
        self._convert(ranks)

    def _complete_directory(self, written: Sequence[WrittenFiles]) -> None:
        """Write the other files, the manifest last, and publish the directory. Rank 0 calls it."""
        plan = self.plan.of_all
        assert plan is not None
        files = {name: entry for part in written for name, entry in part.files.items()}
        for name, data in {**describe_boxes(plan, written), layout.TRAINER_STATE: self._trainer_state}.items():
            files[name] = write_file(self._temporary / name, data)
        seen = commit.sizes(self._temporary)
        if lost := [name for name, entry in files.items() if seen.get(name) != entry.size]:
            raise CheckpointError(
                f"{listed(lost)} in {self._temporary} are missing or cut on rank 0, although all ranks have written "
                f"theirs: save to {common_to_all(self.target)}"
            )
        manifest = Manifest(
            facts=replace(self.contents.facts, world_size=len(written), versions=library_versions()),
            tensors={facts.key: TensorEntry(facts.shape, facts.dtype) for facts, _ in plan.tables},
            aliases=self.contents.aliases,
            slots={facts.key: facts.slot for facts, _ in plan.tables if facts.slot is not None},
            files=files,
        )
        write_file(self._temporary / layout.MANIFEST, manifest.to_json().encode())
        commit.publish_checkpoint(self._temporary, self.target, self._token)


def prepare_save(
    ranks: Ranks,
    path: AnyPath,
    collect: Callable[[], Contents],
    planner: SavePlanner,
    make_skeleton: Callable[[], Skeleton] | None = None,
) -> PendingSave:
    """Prepare a save in the form that the path names (`layout.other_form`). Arguments as of `PendingSave`.

    Another form is made from a temporary directory next to it, so that no rank has more than one full tensor in memory:
    the one file by rank 0, the folder for Hugging Face by all ranks from ``make_skeleton``.
    """
    form = layout.other_form(str(path))
    if form != "full" and (form != "hf" or make_skeleton is None):
        return PendingSave(ranks, path, collect, planner)
    refuse_url(str(path), "one file or a folder for Hugging Face")

    def choose_paths(_: list[None]) -> list[tuple[Path, Path, Skeleton | None]]:
        target = Path(os.path.abspath(str(path)))
        commit.check_replaceable(target)
        parts = layout.temporary_sibling(target, layout.new_token())
        made = make_skeleton() if form == "hf" and make_skeleton is not None else None
        names = replace(made, files={}) if made else None  # rank 0 alone writes the other files
        return [(target, parts, made), *[(target, parts, names)] * (ranks.size - 1)]

    target, parts, skeleton = ranks.exchange(f"starting to save {path}", lambda: None, choose_paths)
    if skeleton is None:
        return PendingSave(ranks, os.fspath(parts), collect, planner, partial(_write_file, target, parts))
    convert = partial(write_hugging_face, target=target, parts=parts, skeleton=skeleton)
    return PendingSave(ranks, os.fspath(parts), lambda: skeleton.part_of(collect()), SavePlanner(), convert)


def _write_file(target: Path, parts: Path, ranks: Ranks) -> None:
    def write() -> None:
        try:
            write_full(target, open_portable(parts))
        finally:
            commit.delete_tree(parts)  # also if it is still being read

    ranks.first(f"writing {target}", write)
