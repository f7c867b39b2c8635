"""Finding and opening a portable checkpoint, and reading it into live tensors, whatever wrote it.

A checkpoint is opened once: every rank reads the manifest, ``trainer.pt`` and ``boxes.bin`` once, and every other file
is compared with its checksum by one rank. What was opened is then loaded; nothing is checked or read again.

The gradients of a step's micro-batches so far lie in a checkpoint as in memory: averaged over the ranks, or every
rank's own in full where they are averaged at the step's end. Where it is read as it was written, both are read back bit
by bit; else a rank's own become averages, and averages every rank's own, which the ranks' average gives back.
"""

import hashlib
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import errors
from lightning_shard.checkpoint import load_optimizers
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.boxes import StoredBoxes, boxes_file, read_boxes
from lightning_shard.checkpoint.files.commit import settle
from lightning_shard.checkpoint.files.layout import Directory
from lightning_shard.checkpoint.files.manifest import (
    Contents,
    Manifest,
    StoredTensor,
    damaged,
    open_checkpoint_directory,
)
from lightning_shard.checkpoint.files.place import AnyPath, Place, place
from lightning_shard.checkpoint.files.tensor_files import read_full, read_own_state, read_tensors
from lightning_shard.checkpoint.files.trainer_state import read_trainer_state
from lightning_shard.checkpoint.matching import LoadReport, Match, match
from lightning_shard.checkpoint.optimizer_state import (
    left_out,
    live_tensors,
    load_extra_state,
    make_room,
    sharded_names,
)
from lightning_shard.checkpoint.plan import digests
from lightning_shard.errors import CheckpointCorruptError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import Accumulated, AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import Names, fqns

_OPENINGS = 20  # of a checkpoint that is replaced all the time, until all ranks have opened the same one


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint directory that was opened and checked; it stays as it is while this object exists."""

    directory: Directory
    manifest: Manifest
    metadata: Mapping[str, StoredBoxes]
    trainer_state: dict[str, Any]  # The contents of ``trainer.pt``, tensors on the CPU.

    @property
    def path(self) -> Place:
        return self.directory.path


def _open(path: layout.StrPath, *, share: tuple[int, int] = (0, 1)) -> OpenCheckpoint:
    settle()
    directory, manifest = open_checkpoint_directory(path)
    try:
        if layout.TRAINER_STATE not in manifest.files and manifest.files and not manifest.tensors:
            raise errors.CheckpointError(
                f"{path} is in Hugging Face's layout and has weights alone: from_pretrained and load_pretrained read "
                "it. To go on training, give a checkpoint whose name does not end in .hf."
            )
        return OpenCheckpoint(
            directory=directory,
            manifest=manifest,
            metadata=read_boxes(directory, manifest, share=share),
            trainer_state=read_trainer_state(directory, manifest),
        )
    except BaseException:
        directory.close()
        raise


def open_checkpoint(path: layout.StrPath) -> OpenCheckpoint:
    """Open the checkpoint directory ``path`` on every rank, the same one; all ranks call it.

    What this process writes in the background is waited for first. All files are compared with their checksums, those
    with tensors each on one rank.

    Raises on every rank the same: CheckpointNotFoundError; CheckpointCorruptError with the names of the files that
    differ; CheckpointError where ranks find different checkpoints at the path.
    """
    ranks = Ranks.of()
    for _ in range(_OPENINGS):
        opened = ranks.agree(f"opening {path}", lambda: _open(path, share=(ranks.rank, ranks.size)))
        digests = ranks.gather(opened.manifest.digest)
        if len(set(digests)) == 1:
            break  # else a save replaced it after one rank had opened it and before another did
    else:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise errors.CheckpointError(
            f"rank {other} finds another checkpoint at {path} than rank 0: load from a directory that all "
            "machines share"
        )
    files, mine = opened.manifest.files, _share(opened.manifest, ranks)

    def merged(found: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{name: text for part in found for name, text in part.items()}] * ranks.size

    if damage := ranks.exchange(f"verifying {path}", lambda: opened.directory.damaged(mine, files), merged):
        opened.directory.close()
        raise damaged(opened.path, damage)
    return opened


def _share(found: Manifest, ranks: Ranks) -> list[str]:
    """The files that this rank hashes: largest first, each to the rank with the fewest bytes."""
    load = [(0, rank) for rank in range(ranks.size)]
    mine = []
    files = {name: file for name, file in found.files.items() if name not in (boxes_file(found), layout.TRAINER_STATE)}
    for name, entry in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        bytes_before, rank = load[0]
        heapq.heapreplace(load, (bytes_before + entry.size + 1, rank))
        if rank == ranks.rank:
            mine.append(name)
    return mine


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
) -> LoadReport:
    """Load a module (wrapped or not) and its optimizers in place. All ranks call it, with any engine and mesh.

    Without ``optimizers`` only the module is loaded. ``masters``: FQN to what is filled in the place of the module's
    own tensor, which stays. ``averages``: FQN to what is filled with the tensor's average, if the checkpoint has
    averages. Each rank reads the boxes that it has, and casts where the dtype differs. With ``configured``,
    hyperparameters of optimizers that differ from the checkpoint's stay as they are. With ``averaged``, weights get
    their averages where the checkpoint has some.

    Raises on every rank the same, before any value is changed (buffers may have been resized by the module's own code):
    CheckpointMismatchError (missing, unexpected and
    reshaped keys together; with ``strict=False`` only reshaped keys, and nothing that matches at all). While tensors
    are read: CheckpointCorruptError.
    """
    ranks, found = Ranks.of(), checkpoint.manifest

    def full(name: str) -> Tensor:
        return read_full(checkpoint.directory, checkpoint.metadata, layout.MODEL_PREFIX + name)

    def prepare() -> tuple[Names, list[tuple[str, LiveTensor]], load_optimizers.OptimizerPlan, LoadReport]:
        if optimizers and layout.OPTIMIZER_STATES not in checkpoint.trainer_state:
            raise errors.CheckpointMismatchError(
                f"{checkpoint.path} has no optimizer state: it was saved with weights only, and a fit needs more. "
                "Resume from another; or begin a new run with its weights: export them (lightning-shard checkpoint "
                "export), for the callback PretrainedWeights."
            )
        shapes = {
            name: entry.shape for name, entry in layout.without_prefix(layout.MODEL_PREFIX, found.tensors).items()
        }
        names = make_room(module, sharded_names(module), shapes, full)
        wanted = {layout.MODEL_PREFIX: live_tensors(names, masters)}
        if averages and any(key.startswith(layout.AVERAGE_PREFIX) for key in found.tensors):
            wanted[layout.AVERAGE_PREFIX] = dict(averages)
        matched = _matched(found, names, wanted, kept=left_out(module, names) if strict else None)
        saved = checkpoint.trainer_state[layout.OPTIMIZER_STATES] if optimizers else []
        plan = load_optimizers.plan_optimizers(optimizers, names, found, saved, matched, configured=configured)
        report = matched.judge(checkpoint.path, strict)
        report = replace(report, overridden=tuple(plan.overridden), averages=len(wanted) > 1)
        live, targets = _joined(wanted), []
        for key, source in matched.sources.items():
            average = layout.AVERAGE_PREFIX + source.removeprefix(layout.MODEL_PREFIX)
            targets.append((average if averaged and average in found.tensors else source, live[key]))
        return names, targets, plan, report

    names, tensors, plan, report = ranks.agree(f"opening {checkpoint.path}", prepare)
    if strict and found.facts.frozen:
        _check_frozen(checkpoint, live_tensors(names, masters))

    def fill(targets: Iterable[tuple[str, Any]]) -> None:
        read_tensors(checkpoint.directory, checkpoint.metadata, targets)

    scalars = ranks.agree(
        f"reading {checkpoint.path}", lambda: load_optimizers.read_scalars(plan, lambda empty: fill(empty.items()))
    )

    def read() -> None:
        fill([*tensors, *load_optimizers.create_slots(plan, scalars)])
        load_optimizers.load_groups(plan)
        load_extra_state(module, names, checkpoint.trainer_state.get(layout.EXTRA_STATE, {}), strict=strict)

    ranks.agree(f"reading {checkpoint.path}", read)
    return report


def _matched(
    found: Manifest, names: Names, wanted: Mapping[str, Mapping[str, LiveTensor]], *, kept: set[str] | None
) -> Match:
    """The checkpoint's tensor for each of the live ones, which are ``wanted`` by prefix of their keys and FQN.

    ``kept``: those that may be missing, with which digests are compared; None: all.
    """
    aliases = {
        p + alias: p + fqn for p, known in wanted.items() for alias, fqn in names.aliases.items() if fqn in known
    }
    stored = {key: entry.shape for key, entry in found.tensors.items() if key.startswith(tuple(wanted))}
    tied = layout.without_prefix(layout.MODEL_PREFIX, found.aliases).items()
    homes = {p + alias: p + key.removeprefix(layout.MODEL_PREFIX) for p in wanted for alias, key in tied}
    matched = match(_shapes(_joined(wanted)), aliases, stored, {a: home for a, home in homes.items() if home in stored})
    if kept is not None:
        digested, own = ({layout.MODEL_PREFIX + fqn for fqn in fqns} for fqns in (found.facts.frozen, kept))
        matched.kept.extend(key for key in matched.missing if key in own - digested)
        matched.missing[:] = [key for key in matched.missing if key not in own | digested]
    matched.unexpected[:] = [key for key in matched.unexpected if key.startswith(layout.MODEL_PREFIX)]
    return matched


def _joined(wanted: Mapping[str, Mapping[str, LiveTensor]]) -> dict[str, LiveTensor]:
    return {prefix + fqn: tensor for prefix, tensors in wanted.items() for fqn, tensor in tensors.items()}


def _check_frozen(checkpoint: OpenCheckpoint, base: Mapping[str, LiveTensor]) -> None:
    """Refuse frozen weights that are not those which the checkpoint was saved without. All ranks call it."""
    frozen = checkpoint.manifest.facts.frozen
    here = digests({fqn: base[fqn] for fqn in frozen if fqn in base})
    if other := [fqn for fqn, digest in frozen.items() if here.get(fqn) != digest]:
        raise errors.CheckpointMismatchError(
            f"{checkpoint.path} was saved without its frozen weights (save_frozen: false), and here are others of "
            f"{layout.listed(other, most=5)}: load the same ones first, in configure_model or on_fit_start. "
            "strict_loading=False goes on from those that are here."
        )


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise errors.CheckpointError(f"{key} is on the meta device: materialise the model before loading into it")
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def open_portable(path: layout.StrPath, *, compared: bool = True) -> Contents:
    """The checkpoint directory ``path``; its tensors are read when asked for. One process calls it.

    Where it is ``compared``, each file is with its checksum when the first tensor in it is read. Raises
    CheckpointNotFoundError or CheckpointCorruptError, then too.
    """
    opened = _open(path)
    found = opened.manifest
    opened.directory.compare(found.files if compared else {})

    def stored(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        return StoredTensor(shape=shape, dtype=dtype, read=lambda: read_full(opened.directory, opened.metadata, key))

    return Contents(
        facts=found.facts,
        tensors={k: stored(k, entry.shape, layout.torch_dtype(entry.dtype)) for k, entry in found.tensors.items()},
        aliases=found.aliases,
        slots=found.slots,
        trainer_state=opened.trainer_state,
        own_states=(lambda: list(_own_states(opened, range(found.facts.world_size)).values()))
        if _has_own_states(opened)
        else None,
    )


def _has_own_states(checkpoint: OpenCheckpoint) -> bool:
    run = checkpoint.trainer_state.get(layout.RUN_STATE)
    return isinstance(run, dict) and "ranks" not in run


def _own_states(checkpoint: OpenCheckpoint, of: Iterable[int]) -> dict[int, dict[str, Any]]:
    return {rank: read_own_state(checkpoint.directory, rank) for rank in of}


def with_own_states(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """`OpenCheckpoint.trainer_state` with what the ranks that saved keep of themselves. All ranks call it.

    Where these states differ in no more than numbers and lengths of lists, each rank reads those of the old ranks that
    it stands for (``rank``, ``rank + size``, ...; a new one ``rank % saved``), and one of these stands in the place of
    each other: what ranks do together with them is then the same on each. Else each rank reads all.
    """
    if not _has_own_states(checkpoint):
        return dict(checkpoint.trainer_state)
    ranks, saved, doing = Ranks.of(), checkpoint.manifest.facts.world_size, f"reading {checkpoint.path}"
    mine: dict[int, dict[str, Any]] = {}

    def look() -> set[str]:
        mine.update(_own_states(checkpoint, range(ranks.rank % saved, saved, ranks.size)))
        return {hashlib.sha256(repr(_outline(state)).encode()).hexdigest() for state in mine.values()}

    if ranks.exchange(doing, look, lambda found: [len(set.union(*found)) == 1] * ranks.size):
        states = [mine.get(rank, next(iter(mine.values()))) for rank in range(saved)]
    else:
        states = list(ranks.agree(doing, lambda: _own_states(checkpoint, range(saved))).values())
    run = {**checkpoint.trainer_state[layout.RUN_STATE], "ranks": states}
    return {**checkpoint.trainer_state, layout.RUN_STATE: run}


def _outline(value: Any) -> Any:
    """``value`` without its numbers, and without what is in lists."""
    if isinstance(value, Mapping):
        return {key: _outline(part) for key, part in value.items()}
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    return value if isinstance(value, (str, bool)) else isinstance(value, (list, tuple))


@dataclass(frozen=True, kw_only=True)
class Found:
    # Paths of the run's checkpoints, with what their manifests say of the run, the newest first.
    own: tuple[tuple[str, Mapping[str, Any]], ...]
    broken: tuple[str, ...]  # Why others of the run are passed over.
    others: tuple[str, ...]  # Names of other runs that have checkpoints there.
    # The first of ``own`` whose files all have their checksums, opened by `open_newest`; None where there is none.
    newest: OpenCheckpoint | None = None


def open_newest(folders: Iterable[AnyPath], run: str) -> Found:
    """Open the newest whole checkpoint of ``run`` in ``folders``: it is ready to be loaded. All ranks call it."""
    found = Ranks.of().first("looking for checkpoints", lambda: find_checkpoints(folders, run))
    broken = list(found.broken)
    for path, _ in found.own:
        try:
            newest = open_checkpoint(path)
        except (errors.CheckpointCorruptError, errors.CheckpointNotFoundError) as error:
            broken.append(str(error))
        else:
            return replace(found, broken=tuple(broken), newest=newest)
    return replace(found, broken=tuple(broken))


def find_checkpoints(folders: Iterable[AnyPath], run: str) -> Found:
    """The checkpoints of ``run`` that lie directly in one of ``folders``. One rank calls it.

    The run is the one that the manifest names: a checkpoint without a name, or with weights only, is never taken.
    Newest: of the most optimizer steps, and among those the one that was saved last. Of the files only the sizes are
    compared. What this process writes in the background is waited for.
    """
    settle()
    own: list[tuple[int, float, str, Mapping[str, Any]]] = []
    broken: list[str] = []
    others: set[str] = set()
    resolved = {place(folder).resolve(): None for folder in folders}
    for path in (path for folder in resolved for path in layout.checkpoint_names(folder)):
        try:
            directory, manifest = open_checkpoint_directory(path)
        except errors.CheckpointUnreachableError:
            raise  # What is there can't be told: an older one, or none, would be a wrong answer.
        except errors.CheckpointError:
            continue  # half-written, or no checkpoint
        facts, sizes = manifest.facts.run, directory.sizes()
        wrong = [name for name, entry in manifest.files.items() if sizes.get(name) != entry.size]
        if facts.get("name") != run:
            others.update([str(facts["name"])] if "name" in facts else [])
        elif wrong:
            broken.append(f"{path} lacks {wrong[0]}, or it has another size than was written")
        else:
            own.append((int(facts["step"]), float(facts["time"]), str(path), facts))
    newest_first = sorted(own, key=lambda one: one[:3], reverse=True)
    return Found(own=tuple(one[2:] for one in newest_first), broken=tuple(broken), others=tuple(sorted(others)))


def keyed(gradients: Mapping[str, Accumulated]) -> dict[str, Any]:
    """Key of a checkpoint to tensor, of gradients by FQN on this rank."""
    keys = {True: layout.GRADIENT_PREFIX, False: f"{layout.RANK_GRADIENT_PREFIX}{Ranks.of().rank}."}
    return {keys[each.reduced] + fqn: each.tensor for fqn, each in gradients.items()}


def stored_gradients(keys: Collection[str]) -> dict[str, dict[int | None, str]]:
    """FQN to key by rank, None: averaged over the ranks; empty where a checkpoint has no gradients."""
    found: dict[str, dict[int | None, str]] = {}
    for key in keys:
        if key.startswith(layout.GRADIENT_PREFIX):
            found.setdefault(key.removeprefix(layout.GRADIENT_PREFIX), {})[None] = key
        elif key.startswith(layout.RANK_GRADIENT_PREFIX):
            rank, _, fqn = key.removeprefix(layout.RANK_GRADIENT_PREFIX).partition(".")
            if not fqn or not rank.isdecimal():
                raise CheckpointCorruptError(f"{key} is the gradient of no rank")
            found.setdefault(fqn, {})[int(rank)] = key
    return found


def load_gradients(
    checkpoint: OpenCheckpoint,
    module: nn.Module,
    begin: Callable[[Collection[str]], Mapping[str, Accumulated]],
    *,
    factor: float,
) -> None:
    """Read a checkpoint's gradients, times ``factor``, into those that ``begin`` makes zeros of. All ranks call it.

    Gradients of what is not trained here are left out. Raises CheckpointCorruptError, on every rank.
    """
    ranks, path, writers = Ranks.of(), checkpoint.path, checkpoint.manifest.facts.world_size
    found = ranks.agree(f"opening {path}", lambda: stored_gradients(checkpoint.manifest.tensors))
    names = fqns(module)
    stored = {own: keys for fqn, keys in found.items() if (own := names.aliases.get(fqn, fqn)) in names.tensors}
    live = begin(stored.keys())

    def read() -> None:
        for name, keys in stored.items():
            if name not in live:
                continue
            if None in keys or live[name].reduced or writers != ranks.size:
                # The average of what some ranks have, where the others have used nothing.
                share = 1.0 if None in keys else 1 / writers
                _read_sum(checkpoint, live[name], list(keys.values()), share * factor)
            else:
                own = [key for rank, key in keys.items() if rank == ranks.rank]
                _read_sum(checkpoint, live[name], own, factor)

    ranks.agree(f"reading {path}", read)


@torch.no_grad()
def _read_sum(checkpoint: OpenCheckpoint, live: Accumulated, keys: Sequence[str], factor: float) -> None:
    """Fill ``live`` with ``factor`` times the sum of stored tensors, which is taken in fp32."""
    sums: list[Tensor] = []
    for key in keys:
        read_tensors(checkpoint.directory, checkpoint.metadata, [(key, live.tensor)])
        here = [part.to(torch.float32, copy=True) for part in live.parts] if len(keys) > 1 or factor != 1 else []
        sums = [one.add_(other) for one, other in zip(sums, here, strict=True)] if sums else here
    for part, total in zip(live.parts, sums, strict=bool(sums)):
        part.copy_(total.mul_(factor))
