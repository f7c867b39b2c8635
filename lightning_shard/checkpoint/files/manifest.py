"""``manifest.json``: the list of a checkpoint's contents and the facts of its run, and `Contents` in these terms.

Contents are live before a save, or stored in files of any form. Stored tensors are read one at a time on request. So
converting and exporting need memory for the largest one only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from lightning_shard.text import listed
from lightning_shard.versions import installed_version

FORMAT = "lightning_shard.checkpoint"
FORMAT_VERSION = 8
"""Version 1 had no ``slots`` and no ``boxes.bin``, and ``trainer.pt`` had the states of all ranks. Versions 2 to 7 were
never released."""

_MOST_BYTES = 1 << 30
_LIBRARIES = ("python", "lightning-shard", "torch", "lightning", "deepspeed", "numpy")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of the run that wrote a checkpoint."""

    engine: str  # ``"ddp"``, ``"fsdp"``, ``"deepspeed"``, or another library
    policy: str  # the precision policy in words
    ledger: Mapping[str, Any] = field(default_factory=dict)  # dtypes measured on live tensors, in plain JSON values
    # Of a training state: ``name`` of the run, optimizer ``step`` and ``time`` (seconds since 1970) of the save.
    run: Mapping[str, Any] = field(default_factory=dict)
    # FQN to digest (`lightning_shard.checkpoint.save_plan`) of each frozen parameter that was left out.
    frozen: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1  # number of ranks that wrote it, set by a save
    versions: Mapping[str, str] = field(default_factory=dict)  # of libraries, set by a save


class TensorEntry(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Manifest:
    facts: Facts
    tensors: Mapping[str, TensorEntry]  # key to global shape and dtype, each tensor once
    aliases: Mapping[str, str]  # key of a tied name to the key of its tensor
    slots: Mapping[str, layout.SlotName]  # key of each tensor of optimizer state to its name
    files: Mapping[str, layout.FileEntry]  # relative name to size and checksum, of every file but the manifest
    format_version: int = FORMAT_VERSION  # readers refuse others than version 1 and their own
    # sha256 of the other fields in canonical JSON, which identifies the checkpoint. Empty before it is written.
    digest: str = ""

    def to_json(self) -> str:
        told = dict(_slots_by_name(self.tensors, self.aliases))
        fields = {
            "format": FORMAT,
            "format_version": self.format_version,
            **asdict(self.facts),
            "tensors": {key: [layout.dtype_name(dtype), *shape] for key, (shape, dtype) in self.tensors.items()},
            "aliases": dict(self.aliases),
            "slots": {key: name for key, name in self.slots.items() if name != told.get(key)},
            "files": {k: {n: v for n, v in asdict(e).items() if n != "block" or v} for k, e in self.files.items()},
        }
        return _lines({**fields, "digest": _digest(fields)}, 2) + "\n"

    @staticmethod
    def from_json(text: str, where: str | os.PathLike[str] = layout.MANIFEST) -> Manifest:
        """Parse ``text``. ``where``: the file, for errors. CheckpointCorruptError: it is no manifest, was changed, or
        names a file outside of the directory. CheckpointError: another version of this package wrote it.
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
                raise errors.CheckpointError(
                    f"{where} has format version {version}; this lightning_shard reads 1 and {FORMAT_VERSION}: upgrade "
                    "it, or convert the checkpoint with the version that wrote it"
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
    """Return ``fields`` after checking that each of ``kinds`` is among them and of its kind."""
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is {fields[name]!r}, not {getattr(kind, '__name__', kind)}")
    return fields


def _file_entry(fields: Mapping[str, Any]) -> layout.FileEntry:
    found = _typed({"block": 0, **fields}, _FILE)
    if found["block"] != 0 and found["block"] < LEAST_BLOCK:
        raise ValueError(f"block is {found['block']}, fewer than {LEAST_BLOCK} bytes")
    return layout.FileEntry(**{name: found[name] for name in _FILE})


def _lines(value: Any, depth: int) -> str:
    """Format as JSON with a line for each entry down to ``depth``, and no other whitespace."""
    if not isinstance(value, dict) or not value or not depth:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{_lines(value[key], depth - 1)}" for key in sorted(value)) + "\n}"


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_entry(value: Any) -> TensorEntry:
    dtype, *shape = (value["dtype"], *value["shape"]) if isinstance(value, dict) else value  # version 1
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} is not a list of sizes")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype) or dtype.startswith(("q", "bits")):
        raise ValueError(f"{dtype!r} is no torch dtype of numbers")
    return TensorEntry(tuple(shape), found)


def _slots(named: Mapping[str, Any], tensors: Collection[str], aliases: Collection[str]) -> dict[str, layout.SlotName]:
    """Key of each tensor of optimizer state to its name: as in ``named``, else split by `_slots_by_name`."""
    told, found = dict(_slots_by_name(tensors, aliases)), {k: layout.SlotName(*name) for k, name in named.items()}
    if any([type(part) for part in name] != [int, str, str] for name in found.values()):
        raise ValueError("slots are not optimizer, FQN and slot")
    if unknown := found.keys() - told.keys():
        raise ValueError(f"slots name {listed(sorted(unknown))}, which are not among the tensors")
    return {**told, **found}


def _slots_by_name(tensors: Collection[str], aliases: Collection[str]) -> Iterator[tuple[str, layout.SlotName]]:
    """Split keys by the longest FQN of the model that follows the optimizer's number."""
    fqns = {k.removeprefix(layout.MODEL_PREFIX) for k in (*tensors, *aliases) if k.startswith(layout.MODEL_PREFIX)}
    for key in tensors:
        if key.startswith(layout.OPTIMIZER_PREFIX):
            _, index, rest = key.split(".", 2)
            parts = rest.split(".")
            # The model lacks a parameter that was left out. Its slot is taken to have no dot, as most.
            end = next((end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in fqns), len(parts) - 1)
            yield key, layout.SlotName(int(index), ".".join(parts[:end]), ".".join(parts[end:]))


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that take part in a checkpoint, without importing them."""
    versions = {library: version for library in _LIBRARIES if (version := installed_version(library)) is not None}
    return {**versions, "torch": str(torch.__version__)}  # the package's metadata may lack "+cu130"


def read_manifest(path: AnyPath) -> Manifest:
    return open_checkpoint_directory(path, lock=False)[1]


def open_checkpoint_directory(path: AnyPath, *, lock: bool = True) -> tuple[Directory, Manifest]:
    """Open the checkpoint directory ``path``. CheckpointNotFoundError, for a half-written one too."""
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
    """Return the entries of ``directory`` that no save wrote: neither named like its files nor in its manifest."""
    there = {entry.name: entry for entry in directory.iterdir()}
    entries = [entry for name, entry in there.items() if not layout.is_own_name(name)]
    if not (directory / layout.MANIFEST).is_file():
        hidden = directory.name.startswith(".")  # a leftover of a save or removal, in any state
        if not hidden and layout.METADATA in there and layout.TRAINER_STATE not in there:
            return [*there.values()]  # torch's form, by another program
        # All files in a leftover of Hugging Face's layout are the interrupted save's.
        return [] if hidden and layout.other_form(directory) == "hf" else entries
    try:
        listed = {name.partition("/")[0] for name in read_manifest(directory).files} if entries else set()
    except errors.CheckpointError:
        listed = set()
    return [entry for entry in entries if entry.name not in listed]


def _why_not_found(path: Path) -> str | None:
    """Explain that there is no checkpoint. None if there is a manifest by now."""
    if path.is_dir():
        said = (
            f"{path} is not a checkpoint, or half-written: it has no {layout.MANIFEST}, which a save writes last. Use "
            f"another one.{other_content(path)}"
        )
        return None if (path / layout.MANIFEST).exists() else said
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, where there is no checkpoint"
    return f"there is no checkpoint at {path}{', which is a file' * path.is_file()}"


def other_content(path: Path) -> str:
    """Say that a path has weights alone or a folder of checkpoints. ``""`` of other contents."""
    if path.suffix == ".safetensors" or any(path.glob("*.safetensors")):
        return f" It has weights alone, from which none resumes: callbacks.PretrainedWeights({str(path)!r}) loads them."
    inside = (each for each in path.rglob("*.ckpt") if each.is_file() or (each / layout.MANIFEST).exists())
    newest = max(inside, key=lambda each: each.stat().st_mtime, default=None)
    return "" if newest is None else f" It is a folder with checkpoints. The newest: ckpt_path={str(newest)!r}."


def damaged(directory: Location, damage: Mapping[str, str]) -> errors.CheckpointCorruptError:
    lines = "\n".join(f"  {damage[name]}" for name in sorted(damage))
    return errors.CheckpointCorruptError(
        f"{directory} is damaged: {listed(sorted(damage), most=20)}\n{lines}\nUse another checkpoint."
    )


def is_checkpoint(path: AnyPath) -> bool:
    """True if ``path`` is a directory with a valid manifest, which is written last."""
    try:
        read_manifest(path)
    except errors.CheckpointError:
        return False
    return True


PORTABLE, FULL = "portable", "full"


def raw_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous tensor on the host."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in a file. A save reads it when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # returns a new contiguous tensor on the host, read again by each call

    @staticmethod
    def of(tensor: Tensor) -> StoredTensor:
        """Wrap a tensor that is mapped from a file. CheckpointError: it is not dense."""
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise errors.CheckpointError(f"there is a {tensor.layout} tensor; only dense tensors can be read")
        read = partial(tensor.detach().clone, memory_format=torch.contiguous_format)
        return StoredTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, read=read)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(self.shape)), sizes=torch.Size(self.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint: one rank's live part before a save, or all that is stored."""

    # Key to tensor, each tensor once: a `StoredTensor`, or this rank's plain tensor (full), DTensor or object that
    # stands for one (`lightning_shard.checkpoint.files.tensor_files`).
    tensors: Mapping[str, Any]
    trainer_state: Mapping[str, Any]  # the contents of ``trainer.pt``, in a save rank 0's
    facts: Facts  # in a save rank 0's
    aliases: Mapping[str, str] = field(default_factory=dict)  # key of a tied name to the key of its tensor
    slots: Mapping[str, layout.SlotName] = field(default_factory=dict)  # key of optimizer state to its name
    own_state: Mapping[str, Any] | None = None  # in a save: state of this rank alone
    # Reads the states that ranks saved for themselves, by rank. None if `trainer_state` has them, or there are none.
    own_states: Callable[[], list[dict[str, Any]]] | None = None
    form: str = PORTABLE  # ``"portable"``, ``"full"``, or another library's name of its own

    @property
    def whole_state(self) -> Mapping[str, Any]:
        """`trainer_state` with the ranks' own states, for other forms."""
        if self.own_states is None:
            return self.trainer_state
        run = {**self.trainer_state[layout.RUN_STATE], "ranks": self.own_states()}
        return {**self.trainer_state, layout.RUN_STATE: run}

    @property
    def has_averages(self) -> bool:
        """True if there are averages of weights with at least one update."""
        updates = self.trainer_state.get(layout.AVERAGING_STATE, {}).get("n_averaged", 1)
        return any(key.startswith(layout.AVERAGE_PREFIX) for key in self.tensors) and bool(updates)

    def averaged(self) -> Contents:
        """Replace weights by their averages. CheckpointError if there are none, or no updates in them."""
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
        averages: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Contents:
        """Make contents from weights, aliases and averages by FQN, and optimizer state by name."""
        tensors = {layout.MODEL_PREFIX + fqn: tensor for fqn, tensor in weights.items()}
        tensors |= {name.key: tensor for name, tensor in slots.items()}
        tensors |= {layout.AVERAGE_PREFIX + fqn: tensor for fqn, tensor in (averages or {}).items()}
        return Contents(
            tensors=tensors,
            aliases={layout.MODEL_PREFIX + alias: layout.MODEL_PREFIX + fqn for alias, fqn in aliases.items()},
            slots={name.key: name for name in slots},
            **rest,
        )
