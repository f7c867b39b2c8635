"""``manifest.json``: what a checkpoint holds, and the facts of the run that wrote it; and its contents in these terms.

Contents are live before a save, or stored in files of any form. Tensors that are stored stay in their files until one
is asked for: converting and exporting take one after the other, so that memory is bounded by the largest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lightning_shard import errors
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.hashing import LEAST_BLOCK
from lightning_shard.checkpoint.files.layout import Directory, open_directory
from lightning_shard.checkpoint.files.location import AnyPath, Location, StorePath, location
from lightning_shard.checkpoint.files.stores import open_store
from lightning_shard.text import did_you_mean, listed
from lightning_shard.versions import installed

FORMAT = "lightning_shard.checkpoint"
FORMAT_VERSION = 8
"""Version 1 had no ``slots`` and no ``boxes.bin``, and ``trainer.pt`` had the states of all ranks. Those between were
never released."""

_MOST_BYTES = 1 << 30
_LIBRARIES = ("python", "lightning-shard", "torch", "lightning", "deepspeed", "numpy")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a checkpoint says of the run that wrote it, on its way from the run to the disk and back."""

    engine: str  # ``"ddp"``, ``"fsdp"``, ``"deepspeed"``, or another library.
    policy: str  # The precision policy in words.
    # The dtypes that were measured on live tensors, in plain JSON values; empty where none were.
    ledger: Mapping[str, Any] = field(default_factory=dict)
    # Of a training state: ``name`` of the run, optimizer ``step`` and ``time`` (seconds since 1970) of the save.
    run: Mapping[str, Any] = field(default_factory=dict)
    # FQN to digest (`lightning_shard.checkpoint.save_plan`) of each frozen parameter that was left out.
    frozen: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1  # Number of ranks that wrote it; a save sets it.
    # Versions of the libraries that wrote it; a save sets them.
    versions: Mapping[str, str] = field(default_factory=dict)


class TensorEntry(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Manifest:
    facts: Facts
    tensors: Mapping[str, TensorEntry]  # Key to global shape and dtype; each tensor once.
    aliases: Mapping[str, str]  # Key of a tied name to the key under which its tensor is stored.
    slots: Mapping[str, layout.SlotName]  # Key of each tensor of optimizer state to what it is.
    files: Mapping[str, layout.FileEntry]  # Relative name to size and checksum, of every file but the manifest.
    format_version: int = FORMAT_VERSION  # Readers refuse others than version 1 and their own.
    # sha256 of the other fields in canonical JSON, which names this very checkpoint; empty before it is written.
    digest: str = ""

    def to_json(self) -> str:
        """The file's text, with the digest computed."""
        told = dict(_slots_by_name(self.tensors, self.aliases))
        fields = {
            "format": FORMAT,
            "format_version": self.format_version,
            **asdict(self.facts),
            "tensors": {key: [layout.dtype_name(dtype), *shape] for key, (shape, dtype) in self.tensors.items()},
            "aliases": dict(self.aliases),
            "slots": {key: name for key, name in self.slots.items() if name != told.get(key)},
            "files": {name: _file_fields(entry) for name, entry in self.files.items()},
        }
        try:
            fields["digest"] = _digest(fields)
        except (TypeError, ValueError) as error:
            raise errors.CheckpointError(
                f"the ledger can't be written into {layout.MANIFEST}: {error}; give plain JSON values"
            ) from error
        return _lines(fields, 2) + "\n"

    @staticmethod
    def from_json(text: str, where: str | os.PathLike[str] = layout.MANIFEST) -> Manifest:
        """The manifest in ``text``; ``where``: the file, in errors. CheckpointCorruptError: it is no manifest, was
        changed, or names a file outside of the directory; CheckpointError: another version of this package wrote it.
        """

        def reason(error: Exception) -> str:
            found = f"no field {error}" if isinstance(error, KeyError) else str(error)[:500]
            return f"{where} is not a checkpoint's manifest: {found}"

        with layout.damaged_if(reason, where):
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.get("format") != FORMAT:
                raise ValueError(f'no "format": "{FORMAT}"')
            digest = fields.pop("digest")
            if digest != _digest(fields):
                raise ValueError("its digest does not match its contents: it was changed after it was written")
            version = fields["format_version"]
            if version not in (1, FORMAT_VERSION):
                todo = "upgrade it" if version > FORMAT_VERSION else "no release wrote it, convert it with what did"
                raise errors.CheckpointError(
                    f"{where} has format version {version}; this lightning_shard reads 1 and {FORMAT_VERSION}: {todo}"
                )
            fields = _typed({**_MAY_LACK, **fields}, _FIELDS)
            if fields["world_size"] < 1:
                raise ValueError(f"world_size is {fields['world_size']}")
            if fields["run"]:
                _typed(fields["run"], _RUN)
            tensors, aliases = {k: _tensor_entry(v) for k, v in fields["tensors"].items()}, fields["aliases"]
            if lost := sorted(map(str, {key for key in aliases.values() if key not in tensors})):
                raise ValueError(f"aliases name {listed(lost)}, which are not among the tensors")
            return Manifest(
                facts=Facts(**{name: fields[name] for name in Facts.__dataclass_fields__}),
                tensors=tensors,
                aliases=aliases,
                slots=_slots(fields["slots"], tensors, aliases),
                files={layout.check_relative(k): _file_entry(v) for k, v in fields["files"].items()},
                format_version=version,
                digest=digest,
            )


_NO_FACTS = asdict(Facts(engine="", policy=""))
_FIELDS: dict[str, Any] = {
    **{name: type(value) for name, value in _NO_FACTS.items()},
    "format_version": int,
    **dict.fromkeys(("tensors", "aliases", "slots", "files"), dict),
}
_MAY_LACK = {name: value for name, value in _NO_FACTS.items() if name not in ("engine", "policy")} | {"slots": {}}
_RUN = {"name": str, "step": int, "time": int | float}
_FILE = {"size": int, "sha256": str, "block": int}


def _typed(fields: Any, kinds: Mapping[str, Any]) -> Any:
    """``fields``, once each of ``kinds`` is among them and of its kind; others are not looked at."""
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is {fields[name]!r}, not {getattr(kind, '__name__', kind)}")
    return fields


def _file_fields(entry: layout.FileEntry) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if name != "block" or value}


def _file_entry(fields: Mapping[str, Any]) -> layout.FileEntry:
    found = _typed({"block": 0, **fields}, _FILE)
    if found["block"] != 0 and found["block"] < LEAST_BLOCK:
        raise ValueError(f"block is {found['block']}, fewer than {LEAST_BLOCK} bytes")
    return layout.FileEntry(**{name: found[name] for name in _FILE})


def _lines(value: Any, depth: int) -> str:
    """JSON with a line for each entry down to ``depth``, and no other whitespace."""
    if not isinstance(value, dict) or not value or not depth:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{_lines(value[key], depth - 1)}" for key in sorted(value)) + "\n}"


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_entry(value: Any) -> TensorEntry:
    dtype, *shape = (value["dtype"], *value["shape"]) if isinstance(value, dict) else value  # of version 1
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} is not a list of sizes")
    return TensorEntry(tuple(shape), layout.torch_dtype(dtype))


def _slots(named: Mapping[str, Any], tensors: Collection[str], aliases: Collection[str]) -> dict[str, layout.SlotName]:
    """Of each key of optimizer state what it is: as ``named``, else as the key tells."""
    told, found = dict(_slots_by_name(tensors, aliases)), {k: layout.SlotName(*name) for k, name in named.items()}
    if any([type(part) for part in name] != [int, str, str] for name in found.values()):
        raise ValueError("slots are not optimizer, FQN and slot")
    if unknown := found.keys() - told.keys():
        raise ValueError(f"slots name {listed(sorted(unknown))}, which are not among the tensors")
    return {**told, **found}


def _slots_by_name(tensors: Collection[str], aliases: Collection[str]) -> Iterator[tuple[str, layout.SlotName]]:
    """By the longest FQN of the model with which a key goes on behind the optimizer's number."""
    fqns = {k.removeprefix(layout.MODEL_PREFIX) for k in (*tensors, *aliases) if k.startswith(layout.MODEL_PREFIX)}
    for key in tensors:
        if key.startswith(layout.OPTIMIZER_PREFIX):
            _, index, rest = key.split(".", 2)
            parts = rest.split(".")
            # A parameter that was left out of the model is known by no name; most slots have no dot.
            end = next((end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in fqns), len(parts) - 1)
            yield key, layout.SlotName(int(index), ".".join(parts[:end]), ".".join(parts[end:]))


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that take part in a checkpoint, without importing them; torch's own build."""
    versions = {library: version for library in _LIBRARIES if (version := installed(library)) is not None}
    return {**versions, "torch": str(torch.__version__)}  # the package of a CUDA build may leave "+cu130" out


def read_manifest(path: AnyPath) -> Manifest:
    return open_checkpoint_directory(path, lock=False)[1]


def open_checkpoint_directory(path: AnyPath, *, lock: bool = True) -> tuple[Directory, Manifest]:
    """The checkpoint directory ``path``, open, and its manifest; CheckpointNotFoundError for a half-written one too."""
    path = location(path)
    if isinstance(path, StorePath):
        return _with_manifest(open_store(path))
    for attempt in itertools.count(1):
        try:
            directory = open_directory(path, lock=lock)
            if layout.MANIFEST in os.listdir(directory.descriptor):
                return _with_manifest(directory)
            directory.close()
        except (FileNotFoundError, NotADirectoryError, errors.CheckpointReplacedError):
            pass
        except OSError as error:
            raise errors.CheckpointError(f"{path} can't be opened: {error}") from error
        if attempt >= layout.ATTEMPTS and (why := _why_not_found(path)) is not None:
            raise errors.CheckpointNotFoundError(why)
        time.sleep(layout.ATTEMPT_SECONDS)
    raise AssertionError


def _with_manifest(directory: Directory) -> tuple[Directory, Manifest]:
    file = directory.path / layout.MANIFEST
    try:
        with directory.open(layout.MANIFEST) as stream, layout.damaged_if(f"{file} is not text"):
            if (size := stream.seek(0, os.SEEK_END)) > _MOST_BYTES:
                raise errors.CheckpointCorruptError(f"{file} has {size} bytes, more than a manifest can have")
            stream.seek(0)
            return directory, Manifest.from_json(stream.read().decode(), str(file))
    except BaseException:
        directory.close()
        raise


def foreign_entries(directory: Path) -> list[Path]:
    """What in ``directory`` no save wrote: not of the names of a checkpoint's files, nor listed in its manifest."""
    there = {entry.name: entry for entry in directory.iterdir()}
    entries = [entry for name, entry in there.items() if not layout.is_own_name(name)]
    if not (directory / layout.MANIFEST).is_file():
        hidden = directory.name.startswith(".")  # what a save or a removal of this package left, in any state
        if not hidden and layout.METADATA in there and layout.TRAINER_STATE not in there:
            return [*there.values()]  # torch's form, of another program
        # Nobody else puts files into what a save of that layout left when it was interrupted.
        return [] if hidden and layout.other_form(directory) == "hf" else entries
    try:
        listed = {name.partition("/")[0] for name in read_manifest(directory).files} if entries else set()
    except errors.CheckpointError:
        listed = set()
    return [entry for entry in entries if entry.name not in listed]


def _why_not_found(directory: Path) -> str | None:
    """None where there is a manifest by now."""
    try:
        names = os.listdir(directory)
        if layout.MANIFEST in names:
            return None
        if names and not foreign_entries(directory):
            return (
                f"{directory} is half-written: it has checkpoint files but no {layout.MANIFEST}, which is written "
                "last. The save was interrupted; use an older checkpoint. The next save to this path removes it."
            )
        return f"{directory} is not a checkpoint: it has no {layout.MANIFEST}.{other_content(directory)}"
    except NotADirectoryError:
        return f"{directory} is a file; a checkpoint of this form is a directory with a {layout.MANIFEST}"
    except FileNotFoundError:
        if directory.is_symlink():
            return f"{directory} is a link to {os.readlink(directory)}, where there is no checkpoint"
        beside = os.listdir(directory.parent) if directory.parent.is_dir() else []
        return f"there is no checkpoint at {directory}.{did_you_mean(directory.name, beside)}"


def other_content(path: Path) -> str:
    """A sentence on weights alone, or on a folder with checkpoints, at a path that is none; ``""`` of others."""
    if path.suffix == ".safetensors" or any(path.glob("*.safetensors")):
        return f" It has weights alone, from which none resumes: callbacks.PretrainedWeights({str(path)!r}) loads them."
    inside = [each for each in path.rglob("*.ckpt") if each.is_file() or (each / layout.MANIFEST).exists()]
    newest = max(inside, key=lambda each: each.stat().st_mtime, default=None)
    return "" if newest is None else f" It is a folder with checkpoints. The newest: ckpt_path={str(newest)!r}."


def damaged(directory: Location, damage: Mapping[str, str]) -> errors.CheckpointCorruptError:
    lines = "\n".join(f"  {damage[name]}" for name in sorted(damage))
    return errors.CheckpointCorruptError(
        f"{directory} is damaged: {listed(sorted(damage), most=20)}\n{lines}\nUse another checkpoint."
    )


def is_checkpoint(path: AnyPath) -> bool:
    """Whether ``path`` is a directory with a valid manifest; a half-written one is not. Never raises."""
    try:
        read_manifest(path)
    except errors.CheckpointError:
        return False
    return True


PORTABLE, FULL = "portable", "full"


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in a file, which a save reads when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # A new contiguous tensor on the host; every call reads again.

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(self.shape)), sizes=torch.Size(self.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is to be saved on one rank, or what was stored."""

    # Key to tensor, each tensor once: a `StoredTensor`, or this rank's plain tensor (full), DTensor or what stands for
    # one (see `lightning_shard.checkpoint.files.tensor_files`).
    tensors: Mapping[str, Any]
    trainer_state: Mapping[str, Any]  # What ``trainer.pt`` has. In a save rank 0's counts.
    facts: Facts  # In a save rank 0's count.
    aliases: Mapping[str, str] = field(default_factory=dict)  # Key of a tied name to the key of its tensor.
    # Key of each tensor of optimizer state to what it is.
    slots: Mapping[str, layout.SlotName] = field(default_factory=dict)
    own_state: Mapping[str, Any] | None = None  # In a save: what this rank alone goes on with.
    # Of what was stored: that of each rank that saved it, read when called; None: `trainer_state` has it, or nothing.
    own_states: Callable[[], list[dict[str, Any]]] | None = None
    form: str = PORTABLE  # ``"portable"``, ``"full"``, or what another library calls its own.

    @property
    def whole_state(self) -> Mapping[str, Any]:
        """`trainer_state` with what each rank keeps of itself, where other ranks, or other forms, are to have it."""
        if self.own_states is None:
            return self.trainer_state
        run = {**self.trainer_state[layout.RUN_STATE], "ranks": self.own_states()}
        return {**self.trainer_state, layout.RUN_STATE: run}

    @property
    def has_averages(self) -> bool:
        """Whether there are averages of weights, with an update in them."""
        updates = self.trainer_state.get(layout.AVERAGING_STATE, {}).get("n_averaged", 1)
        return any(key.startswith(layout.AVERAGE_PREFIX) for key in self.tensors) and bool(updates)

    def averaged(self) -> Contents:
        """The same with averages in the place of their weights; CheckpointError where there are none, or no updates."""
        averages = layout.without_prefix(layout.AVERAGE_PREFIX, self.tensors)
        if not self.has_averages:
            raise errors.CheckpointError(
                "the checkpoint has no averages of weights"
                + (" yet: no update is in them" if averages else "; EMACallback takes them")
            )
        tensors = {k: averages.get(k.removeprefix(layout.MODEL_PREFIX), t) for k, t in self.tensors.items()}
        return replace(self, tensors=tensors)

    @staticmethod
    def of(
        weights: Mapping[str, Any],
        aliases: Mapping[str, str],
        slots: Mapping[layout.SlotName, Any],
        further: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Contents:
        """Of weights by FQN, tied FQNs to those, optimizer state, and ``further`` tensors by key; ``rest`` as here."""
        tensors = {layout.MODEL_PREFIX + fqn: tensor for fqn, tensor in weights.items()}
        return Contents(
            tensors={**tensors, **{name.key: tensor for name, tensor in slots.items()}, **(further or {})},
            aliases={layout.MODEL_PREFIX + alias: layout.MODEL_PREFIX + fqn for alias, fqn in aliases.items()},
            slots={name.key: name for name in slots},
            **rest,
        )
