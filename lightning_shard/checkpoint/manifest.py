"""``manifest.json``: what a checkpoint holds and who wrote it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.layout import (
    MANIFEST,
    FileEntry,
    check_relative,
    holds_only_checkpoint_files,
    torch_dtype,
)
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

FORMAT = "lightning_shard.checkpoint"
FORMAT_VERSION = 1

_LIBRARIES = ("lightning-shard", "torch", "lightning", "deepspeed", "numpy")


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Global shape and dtype name (``"float32"``) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``."""

    engine: str
    """What wrote it: ``"ddp"``, ``"fsdp"``, ``"deepspeed"``."""

    policy: str
    """The precision policy in words."""

    ledger: Mapping[str, Any]
    """The dtypes that were measured on live tensors; empty where none were."""

    world_size: int
    """Number of ranks that wrote it."""

    tensors: Mapping[str, TensorEntry]
    """Key to global shape and dtype; each tensor once."""

    aliases: Mapping[str, str]
    """Key of a tied name to the key under which its tensor is stored."""

    files: Mapping[str, FileEntry]
    """Relative name to size and checksum, of every file but the manifest."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """Of a training state: ``name`` of the run, optimizer ``step`` and ``time`` (seconds since 1970) of the save."""

    format_version: int = FORMAT_VERSION
    """Readers refuse a version above their own."""

    digest: str = ""
    """sha256 of the other fields in canonical JSON, which names this very checkpoint; empty before it is written."""

    def to_json(self) -> str:
        """The file's text, with the digest computed."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "format_version": self.format_version,
            "versions": dict(self.versions),
            "engine": self.engine,
            "policy": self.policy,
            "ledger": self.ledger,
            "world_size": self.world_size,
            "run": dict(self.run),
            "tensors": {k: {"shape": list(t.shape), "dtype": t.dtype} for k, t in self.tensors.items()},
            "aliases": dict(self.aliases),
            "files": {k: {"size": f.size, "sha256": f.sha256} for k, f in self.files.items()},
        }
        try:
            fields["digest"] = _digest(fields)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the ledger can't be written into {MANIFEST}: {error}; give plain JSON values"
            ) from error
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str, where: str | os.PathLike[str] = MANIFEST) -> Manifest:
        """The manifest in ``text``; ``where`` names the file in errors.

        Raises CheckpointCorruptError where it is not a manifest, its digest does not match or a file name leaves the
        directory, CheckpointError where a newer version of this package wrote it.
        """
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.get("format") != FORMAT:
                raise ValueError(f'no "format": "{FORMAT}"')
            digest = fields.pop("digest")
            if digest != _digest(fields):
                raise ValueError("its digest does not match its contents: it was changed after it was written")
            if fields["format_version"] > FORMAT_VERSION:
                raise CheckpointError(
                    f"{where} has format version {fields['format_version']}; this lightning_shard reads up to "
                    f"{FORMAT_VERSION}: upgrade it"
                )
            return Manifest(
                engine=_typed(fields, "engine", str),
                policy=_typed(fields, "policy", str),
                ledger=_typed(fields, "ledger", dict),
                world_size=_typed(fields, "world_size", int),
                tensors={k: _tensor_entry(v) for k, v in _typed(fields, "tensors", dict).items()},
                aliases=_typed(fields, "aliases", dict),
                files={check_relative(k): _file_entry(v) for k, v in _typed(fields, "files", dict).items()},
                versions=_typed(fields, "versions", dict),
                run=_typed({"run": {}, **fields}, "run", dict),
                format_version=fields["format_version"],
                digest=digest,
            )
        except CheckpointError as error:
            if isinstance(error, CheckpointCorruptError):
                raise CheckpointCorruptError(f"{where}: {error}") from error
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointCorruptError(f"{where} is not a checkpoint's manifest: {reason}") from error


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}, not {kind.__name__}")
    return value


def _tensor_entry(value: Any) -> TensorEntry:
    shape, dtype = tuple(value["shape"]), value["dtype"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} is not a list of sizes")
    torch_dtype(dtype)
    return TensorEntry(shape=shape, dtype=dtype)


def _file_entry(value: Any) -> FileEntry:
    return FileEntry(size=_typed(value, "size", int), sha256=_typed(value, "sha256", str))


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that take part in a checkpoint, without importing them."""
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint directory ``path``.

    Raises CheckpointNotFoundError where there is no directory or no manifest in it (half-written),
    CheckpointCorruptError where the manifest is damaged.
    """
    directory = Path(path)
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_why_not_found(directory)) from None
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError(f"{directory / MANIFEST} is not text: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{directory / MANIFEST} can't be read: {error}") from error
    return Manifest.from_json(text, directory / MANIFEST)


def _why_not_found(directory: Path) -> str:
    if directory.is_dir():
        if holds_only_checkpoint_files(directory) and any(directory.iterdir()):
            return (
                f"{directory} is half-written: it has checkpoint files but no {MANIFEST}, which is written last. "
                "The save was interrupted; use an older checkpoint. The next save to this path removes it."
            )
        return f"{directory} is not a checkpoint: it has no {MANIFEST}"
    if directory.exists():
        return f"{directory} is a file; a checkpoint of this form is a directory with a {MANIFEST}"
    return f"there is no checkpoint at {directory}"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory with a valid manifest; a half-written one is not. Never raises."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True
