"""Finding, opening and reading portable checkpoints into live tensors, whichever engine wrote them.

A checkpoint is opened once. Every rank reads the manifest, ``trainer.pt`` and ``boxes.bin`` once, and one rank compares
each other file with its checksum. Loading checks and reads nothing of these a second time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_shard import errors
from lightning_shard.checkpoint import optimizer_state
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.boxes import StoredBoxes, boxes_file, read_boxes
from lightning_shard.checkpoint.files.commit import wait_for_background_saves
from lightning_shard.checkpoint.files.layout import Directory
from lightning_shard.checkpoint.files.location import AnyPath, Location, common_to_all, location
from lightning_shard.checkpoint.files.manifest import (
    Contents,
    Manifest,
    StoredTensor,
    damaged,
    open_checkpoint_directory,
)
from lightning_shard.checkpoint.files.tensor_files import read_full, read_own_state, read_tensors
from lightning_shard.checkpoint.files.trainer_state import read_trainer_state
from lightning_shard.checkpoint.load_optimizers import OptimizerPlan, create_slots, plan_optimizers
from lightning_shard.checkpoint.matching import LoadReport, by_key, match_keys
from lightning_shard.checkpoint.save_plan import digests
from lightning_shard.checkpoint.state_dict import StateDict, StoredValues
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import Names
from lightning_shard.text import listed


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint directory that was opened and checked. It stays unchanged while this object exists."""

    directory: Directory
    manifest: Manifest
    metadata: Mapping[str, StoredBoxes]
    trainer_state: dict[str, Any]  # the contents of ``trainer.pt``, tensors on the CPU

    @property
    def path(self) -> Location:
        return self.directory.path

    def full(self, key: str) -> Tensor:
        """Read the full tensor ``key`` into new host memory. No communication."""
        return read_full(self.directory, self.metadata, key)

    def state_dict(self) -> dict[str, Tensor]:
        """Return each name of the module, tied ones too, to a tensor that is read when its values are used."""
        keys, tensors = StateDict.of(self.manifest).keys, self.manifest.tensors
        stored = {key: StoredValues.of(key, *tensors[key], self.full) for key in keys.values()}
        return {name: stored[key] for name, key in keys.items()}


@layout.again_if_replaced
def _open(path: layout.StrPath, share: tuple[int, int] = (0, 1)) -> OpenCheckpoint:
    wait_for_background_saves()
    directory, manifest = open_checkpoint_directory(path)
    try:
        if layout.TRAINER_STATE not in manifest.files and manifest.files and not manifest.tensors:
            raise errors.CheckpointError(
                f"{path} is in Hugging Face's layout and has weights alone: from_pretrained and load_pretrained read "
                "it. To go on training, give a checkpoint whose name does not end in .hf."
            )
        boxes, state = read_boxes(directory, manifest, share=share), read_trainer_state(directory, manifest)
        return OpenCheckpoint(directory=directory, manifest=manifest, metadata=boxes, trainer_state=state)
    except BaseException:
        directory.close()
        raise


@layout.again_if_replaced
def open_checkpoint(path: layout.StrPath) -> OpenCheckpoint:
    """Open the checkpoint directory ``path``, the same on every rank, after background saves. All ranks call it.

    All files are compared with their checksums, each file with tensors by one rank. On every rank the same:
    CheckpointNotFoundError, CheckpointCorruptError with the files that differ, CheckpointError if ranks found different
    checkpoints.
    """
    ranks = Ranks.of()
    opened = ranks.agree(f"opening {path}", lambda: _open(path, (ranks.rank, ranks.size)))
    digests = ranks.gather(opened.manifest.digest)
    if len(set(digests)) > 1:  # a save may have replaced it after one rank opened it and before another did
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise errors.CheckpointReplacedError(
            f"rank {other} finds another checkpoint at {path} than rank 0: load from {common_to_all(opened.path)}"
        )
    files, apart = opened.manifest.files, {boxes_file(opened.manifest), layout.TRAINER_STATE}
    largest_first = sorted(files.keys() - apart, key=lambda name: (-files[name].size, name))
    mine = largest_first[ranks.rank :: ranks.size]

    def merged(found: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{name: text for part in found for name, text in part.items()}] * ranks.size

    if damage := ranks.exchange(f"verifying {path}", lambda: opened.directory.damaged(mine, files), merged):
        opened.directory.close()
        raise damaged(opened.path, damage)
    return opened


def load_training_state(
    checkpoint: OpenCheckpoint,
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer] = (),
    masters: Mapping[str, LiveTensor] | None = None,
    averages: Mapping[str, Any] | None = None,
    strict: bool = True,
    configured: bool = False,
    averaged: bool = False,
    state: StateDict | None = None,
) -> LoadReport:
    """Load a module (wrapped or not) and its optimizers, if any, in place. All ranks call it, with any engine and mesh.

    Each rank reads the boxes that it has and casts to the live dtype. ``masters``, ``averages``: FQN to the tensor that
    is filled instead of the module's own, and to the one that gets the tensor's average, if there are averages.
    ``configured``: optimizers keep hyperparameters that differ from the checkpoint's. ``averaged``: weights get their
    averages, if any. ``state``: the names and values that the module's own code made of the checkpoint's.

    On every rank the same, before any value changes: CheckpointMismatchError with the missing, unexpected and reshaped
    keys (with ``strict=False`` only for reshaped keys or if nothing matches). While tensors are read:
    CheckpointCorruptError.
    """
    ranks, found = Ranks.of(), checkpoint.manifest
    state = StateDict.of(found) if state is None else state

    def full(key: str) -> Tensor:
        return state.values[key] if key in state.values else checkpoint.full(key)

    def fill(targets: Iterable[tuple[str, Any]]) -> None:
        stored = [(key, target) for key, target in targets if not state.fill(key, target)]
        read_tensors(checkpoint.directory, checkpoint.metadata, stored)

    def prepare() -> tuple[Names, list[tuple[str, LiveTensor]], OptimizerPlan, LoadReport]:
        if optimizers and layout.OPTIMIZER_STATES not in checkpoint.trainer_state:
            raise errors.CheckpointMismatchError(
                f"{checkpoint.path} has no optimizer state: it was saved with weights only, and a fit needs more. "
                "Resume from another; or begin a new run with its weights: export them (lightning-shard checkpoint "
                "export), for the callback PretrainedWeights."
            )
        names = optimizer_state.sharded_names(module)
        wanted = {layout.MODEL_PREFIX: optimizer_state.live_tensors(names, masters)}
        if averages and any(key.startswith(layout.AVERAGE_PREFIX) for key in found.tensors):
            wanted[layout.AVERAGE_PREFIX] = dict(averages)
        kept = optimizer_state.left_out(module, names) if strict else None
        matched = match_keys(found, state, names, wanted, kept=kept)
        if ranks.is_first:  # all ranks hear of the result
            doubles = ((key, full(key), full(taken)) for key, taken in matched.doubles)
            matched.unexpected.extend(k for k, a, b in doubles if a.shape != b.shape or not a.equal(b.to(a.dtype)))
        saved = checkpoint.trainer_state[layout.OPTIMIZER_STATES] if optimizers else []
        more: dict[str, Any] = {"homes": state.keys, "configured": configured}
        plan = plan_optimizers(optimizers, names, found, saved, matched, lambda new: fill(new.items()), **more)
        report = matched.report_or_raise(checkpoint.path, strict)
        report = replace(report, overridden=tuple(plan.overridden), averages=len(wanted) > 1)
        live, targets = by_key(wanted), []
        for key, source in matched.sources.items():
            average = layout.AVERAGE_PREFIX + source.removeprefix(layout.MODEL_PREFIX)
            targets.append((average if averaged and average in found.tensors else source, live[key]))
        return names, targets, plan, report

    names, tensors, plan, report = ranks.agree(f"opening {checkpoint.path}", prepare)
    if strict and found.facts.frozen:
        _check_frozen(checkpoint, optimizer_state.live_tensors(names, masters))

    def read() -> None:
        fill([*tensors, *create_slots(plan)])
        extra = checkpoint.trainer_state.get(layout.EXTRA_STATE, {})
        optimizer_state.load_extra_state(module, names, extra, strict=strict)

    ranks.agree(f"reading {checkpoint.path}", read)
    return report


def _check_frozen(checkpoint: OpenCheckpoint, base: Mapping[str, LiveTensor]) -> None:
    """Refuse frozen weights that differ from those left out of the checkpoint. All ranks call it."""
    frozen = checkpoint.manifest.facts.frozen
    here = digests({fqn: base[fqn] for fqn in frozen if fqn in base})
    if other := [fqn for fqn, digest in frozen.items() if here.get(fqn) != digest]:
        raise errors.CheckpointMismatchError(
            f"{checkpoint.path} was saved without its frozen weights (save_frozen: false), and here are others of "
            f"{listed(sorted(other))}: load the same ones first, in configure_model or on_fit_start. "
            "strict_loading=False goes on from those that are here."
        )


def open_portable(path: layout.StrPath, *, compared: bool = True) -> Contents:
    """Open the checkpoint directory ``path``. Tensors are read when asked for, files first checked if ``compared``."""
    opened = _open(path)
    found = opened.manifest
    opened.directory.unchecked.update(found.files if compared else {})
    stored = {
        key: StoredTensor(shape=shape, dtype=dtype, read=partial(opened.full, key))
        for key, (shape, dtype) in found.tensors.items()
    }
    own_states = partial(_own_states, opened) if _has_own_states(opened) else None
    return Contents(
        facts=found.facts,
        tensors=stored,
        aliases=found.aliases,
        slots=found.slots,
        trainer_state=opened.trainer_state,
        own_states=own_states,
    )


def _has_own_states(checkpoint: OpenCheckpoint) -> bool:
    run = checkpoint.trainer_state.get(layout.RUN_STATE)
    return isinstance(run, dict) and "ranks" not in run


def _own_states(checkpoint: OpenCheckpoint) -> list[dict[str, Any]]:
    return [read_own_state(checkpoint.directory, rank) for rank in range(checkpoint.manifest.facts.world_size)]


def with_own_states(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return `OpenCheckpoint.trainer_state` with the states that each rank saved for itself. Rank 0 reads them. All
    ranks call it.
    """
    if not _has_own_states(checkpoint):
        return dict(checkpoint.trainer_state)
    ranks = Ranks.of()
    states = ranks.agree(f"reading {checkpoint.path}", lambda: _own_states(checkpoint) if ranks.is_first else [])
    run = {**checkpoint.trainer_state[layout.RUN_STATE], "ranks": ranks.broadcast(states)}
    return {**checkpoint.trainer_state, layout.RUN_STATE: run}


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoints:
    # Path and the manifest's facts of the run, of each checkpoint of the run, newest first.
    own: tuple[tuple[str, Mapping[str, Any]], ...]
    broken: tuple[str, ...]  # why others, of the run or of an unknown one, are passed over
    # The first of ``own`` whose files all match their checksums, opened by `open_newest`. None if there is none.
    newest: OpenCheckpoint | None = None


def open_newest(folders: Iterable[AnyPath], run: str) -> FoundCheckpoints:
    """Open the newest whole checkpoint of ``run`` in ``folders``, ready to be loaded. All ranks call it."""
    for attempt in range(layout.ATTEMPTS):
        found = Ranks.of().first("looking for checkpoints", lambda: find_checkpoints(folders, run))
        broken = list(found.broken)
        for path, _ in found.own:
            try:
                return replace(found, broken=tuple(broken), newest=open_checkpoint(path))
            except errors.CheckpointNotFoundError as error:
                if attempt + 1 < layout.ATTEMPTS:
                    break  # Another process removed it after saving a newer one. The next attempt finds that.
                broken.append(str(error))
            except errors.CheckpointCorruptError as error:
                broken.append(str(error))
        else:
            return replace(found, broken=tuple(broken))
    return replace(found, broken=tuple(broken))


def find_checkpoints(folders: Iterable[AnyPath], run: str) -> FoundCheckpoints:
    """Find the checkpoints of ``run`` directly in ``folders`` by their manifests. One rank calls it.

    Checkpoints without a run's name or with weights only are not counted. The newest has the most optimizer steps, then
    the latest time. Only sizes of files are compared. Background saves of this process are waited for.
    """
    wait_for_background_saves()
    own: list[tuple[int, float, str, Mapping[str, Any]]] = []
    broken: list[str] = []
    resolved = dict.fromkeys(location(folder).resolve() for folder in folders)
    for path in (path for folder in resolved for path in layout.checkpoint_names(folder)):
        try:
            facts, wrong = _run_and_damage(path)
        except errors.CheckpointUnreachableError:
            raise  # an older checkpoint, or none, would be a wrong answer
        except errors.CheckpointError as error:
            # Other paths are half-written or no checkpoints.
            if path.name.endswith(".ckpt") and not isinstance(error, errors.CheckpointNotFoundError):
                broken.append(f"{error}, so that its run is not known")
            continue
        if facts.get("name") != run:
            continue
        if wrong:
            broken.append(f"{path} lacks {wrong[0]}, or it has another size than was written")
        else:
            own.append((int(facts["step"]), float(facts["time"]), str(path), facts))
    newest_first = sorted(own, key=lambda one: one[:3], reverse=True)
    return FoundCheckpoints(own=tuple(one[2:] for one in newest_first), broken=tuple(broken))


@layout.again_if_replaced
def _run_and_damage(path: AnyPath) -> tuple[Mapping[str, Any], list[str]]:
    """Return the manifest's facts of the run, and the files whose size differs from the manifest's."""
    directory, manifest = open_checkpoint_directory(path)
    sizes = directory.sizes()
    wrong = [name for name, entry in manifest.files.items() if sizes.get(name) != entry.size]
    if wrong:
        directory.check_current()
    # No run resumes from Hugging Face's layout.
    return manifest.facts.run if layout.TRAINER_STATE in manifest.files else {}, wrong
