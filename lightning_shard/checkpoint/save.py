"""Saving a portable checkpoint: all ranks agree on who writes what, and write it. A save has two halves, `Begun` and
its `finish`, which is told where the values come from and over which group ranks speak: in the background it writes
copies, over a group of its own.
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
from lightning_shard.checkpoint.files.tensor_files import Values, Written, describe_boxes, write_boxes, write_file
from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.foreign.hugging_face import Skeleton, write_hugging_face
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.checkpoint.optimizer_state import extra_state, live_tensors, optimizer_states, sharded_names
from lightning_shard.checkpoint.plan import Plans, digests, live_values
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor


def digests_of_frozen(
    module: nn.Module, masters: Mapping[str, LiveTensor], averages: Mapping[str, Any] | None
) -> dict[str, str]:
    """FQN to digest of each parameter that is not trained, if its average, where it has one, is the same. All ranks
    call it. ``masters``, ``averages``: as in `training_state`.
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
    """What there is to save of a module (wrapped or not), its optimizers and the rest of the run. No communication.

    ``trainer_state`` gets the groups' hyperparameters, and what the module keeps beyond tensors. ``own_state``: what
    this rank alone goes on with. No ``optimizers``: weights only. ``leave_out``: FQNs that the checkpoint is not to
    have. ``masters``, ``averages``: FQN to what is saved in the place of the module's own tensor, and to its average.
    Buffers are the same on all ranks.
    """
    names = sharded_names(module)
    live = {fqn: tensor for fqn, tensor in live_tensors(names, masters).items() if fqn not in leave_out}
    slots, described = optimizer_states(optimizers, names)
    averages_of = {layout.AVERAGE_PREFIX + fqn: average for fqn, average in (averages or {}).items() if fqn in live}
    own: dict[str, Any] = {layout.EXTRA_STATE: extra_state(module, names)}
    if optimizers:
        own[layout.OPTIMIZER_STATES] = described
    return Contents.of(
        weights=live,
        aliases={alias: fqn for alias, fqn in names.aliases.items() if fqn in live},
        slots=slots,
        further=averages_of,
        trainer_state={**trainer_state, **own},
        own_state=own_state,
        facts=facts,
    )


def write_portable(path: AnyPath, contents: Contents) -> None:
    """Write ``contents``, the same on all ranks, as the directory ``path``, as `Begun` does. All ranks call it."""
    ranks = Ranks.of()
    Begun(ranks, path, lambda: contents, Plans()).finish(ranks, live_values(contents.tensors))


class Begun:
    """A save whose values are still to be written, by `finish`: nothing of the rest can change any more. It is complete
    or not made at all; each box is written by one of the ranks that have it.
    """

    def __init__(self, ranks: Ranks, path: AnyPath, collect: Callable[[], Contents], plans: Plans) -> None:
        """Agree with all ranks on the plan. All ranks call it; rank 0's ``path`` counts. ``collect`` gives what is
        saved, on each rank, without communication. The same CheckpointError on every rank if any fails; an older
        checkpoint stays then.
        """
        self._token = layout.new_token()
        # Rank 0's contents of ``trainer.pt``, and what follows this rank's boxes.
        self._trainer_state = self._own_state = b""
        # What makes another form of the directory; all ranks call it.
        self.then: Callable[[Ranks], object] = lambda ranks: None

        def look() -> bool:
            self.state = collect()
            if self.state.own_state is not None:
                self._own_state = encode_trainer_state(self.state.own_state)
            return plans.still_holds(self.state.tensors, self.state.slots)

        def decide(known: list[bool]) -> list[tuple[Location, Location, bool]]:
            self._trainer_state = encode_trainer_state(self.state.whole_state)
            target = location(path).absolute()
            return [(target, commit.begin(target, self._token), all(known))] * ranks.size

        self.target, self._temporary, still_holds = ranks.exchange(f"starting to save {path}", look, decide)
        with commit.deleted_on_failure(self._temporary, here=ranks.is_first):
            self.plan = plans.agreed(ranks, still_holds=still_holds)

    def finish(self, ranks: Ranks, values: Values) -> None:
        """Write the values and put the checkpoint in place, over ``ranks``. All ranks call it; errors as before."""
        with commit.deleted_on_failure(self._temporary, here=ranks.is_first):
            written = ranks.collect(f"writing {self.target}", lambda: self._write(ranks.rank, values))
            ranks.first(f"completing {self.target}", lambda: self._complete(written))
        self.then(ranks)

    def _write(self, rank: int, values: Values) -> Written:
        written = write_boxes(self._temporary, rank, self.plan.mine, values, self._own_state)
        if rank == 0:
            entry = write_file(self._temporary / layout.TRAINER_STATE, self._trainer_state)
            return replace(written, files={**written.files, layout.TRAINER_STATE: entry})
        return written

    def _complete(self, written: Sequence[Written]) -> None:
        """On rank 0: the metadata, last the manifest, then all of it in place."""
        plan = self.plan.of_all
        assert plan is not None
        files = {name: entry for part in written for name, entry in part.files.items()}
        for name, data in describe_boxes(plan, written).items():
            files[name] = write_file(self._temporary / name, data)
        seen = commit.sizes(self._temporary)
        for name, entry in files.items():
            if seen.get(name) != entry.size:
                found = f"has {seen[name]} bytes" if name in seen else "does not exist"
                raise CheckpointError(
                    f"a rank wrote {entry.size} bytes to {self._temporary / name}, but on rank 0 it {found}: save to "
                    f"{common_to_all(self.target)}"
                )
        tensors = {facts.key: TensorEntry(facts.shape, facts.dtype) for facts in plan.tensors}
        slots = {facts.key: facts.slot for facts in plan.tensors if facts.slot is not None}
        assert slots.keys() == {key for key in tensors if key.startswith(layout.OPTIMIZER_PREFIX)}
        manifest = Manifest(
            facts=replace(self.state.facts, world_size=len(written), versions=library_versions()),
            tensors=tensors,
            aliases=self.state.aliases,
            slots=slots,
            files=files,
        )
        write_file(self._temporary / layout.MANIFEST, manifest.to_json().encode())
        commit.publish(self._temporary, self.target, self._token)


def begin_any(
    ranks: Ranks,
    path: AnyPath,
    collect: Callable[[], Contents],
    plans: Plans,
    wanted: Callable[[], Skeleton] | None = None,
) -> Begun:
    """A `Begun` save in the `layout.other_form` that the path names, if any, made from a directory beside it, so that
    no rank has more than one full tensor: the file by rank 0, the folder by all ranks from ``wanted``.
    """
    form = layout.other_form(str(path))
    wanted = wanted if form == "hf" else None
    if wanted is None and form != "full":
        return Begun(ranks, path, collect, plans)
    refuse_url(str(path), "one file or a folder for Hugging Face")

    def look(_: list[None]) -> list[tuple[Path, Path, Skeleton | None]]:
        target = Path(os.path.abspath(str(path)))
        commit.check_replaceable(target)
        parts, skeleton = layout.temporary_sibling(target, layout.new_token()), wanted() if wanted else None
        names = replace(skeleton, files={}) if skeleton else None
        return [(target, parts, skeleton), *[(target, parts, names)] * (ranks.size - 1)]

    target, parts, skeleton = ranks.exchange(f"starting to save {path}", lambda: None, look)
    if skeleton is None:
        begun = Begun(ranks, os.fspath(parts), collect, plans)
        begun.then = partial(_write_file, target, parts)
    else:
        begun = Begun(ranks, os.fspath(parts), lambda: skeleton.part_of(collect()), Plans())
        begun.then = partial(write_hugging_face, target=target, parts=parts, wanted=skeleton)
    return begun


def _write_file(target: Path, parts: Path, ranks: Ranks) -> None:
    def write() -> None:
        try:
            write_full(target, open_portable(parts))
        finally:
            commit.delete_tree(parts)  # Whatever still reads them.

    ranks.first(f"writing {target}", write)
