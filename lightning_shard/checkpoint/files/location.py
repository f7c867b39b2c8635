"""Location of a checkpoint: a path of the file system, or a key in an object store that fsspec reaches."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from lightning_shard.errors import CheckpointError, CheckpointUnreachableError, chain

StrPath = str | os.PathLike[str]

# Errors of S3's, Google's and Azure's servers. A missing key in an existing bucket may only not be there yet.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|(bucket|container) does not exist", re.IGNORECASE)


@dataclass(frozen=True)
class StorePath:
    """A key, or prefix of keys, in a store, with some members of ``pathlib.Path``. No listing is cached, because others
    write too. CheckpointUnreachableError: no answer, a refusal, or no such bucket.
    """

    fs: AbstractFileSystem
    key: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.key))

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.fs, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        return StorePath(self.fs, self.key.rpartition("/")[0])

    def absolute(self) -> StorePath:
        return self

    resolve = absolute

    def is_file(self) -> bool:
        with self._asking():
            return bool(self.fs.isfile(self.key))

    def exists(self) -> bool:
        """True if there are objects below."""
        return bool(self._entries())

    is_dir = exists

    def open(self, mode: str) -> BinaryIO:
        """Open a new object. It is uploaded in parts while it is written, and appears when it is closed."""
        with self._asking():
            return cast(BinaryIO, self.fs.open(self.key, mode.replace("x", "w")))

    def sizes(self) -> dict[str, int]:
        """Name to bytes of each object directly below."""
        return {name: size for name, size in self._entries().items() if size is not None}

    def folders(self) -> list[str]:
        """Names directly below that have objects below."""
        return sorted(name for name, size in self._entries().items() if size is None)

    def _entries(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError), self._asking():
            for entry in self.fs.ls(self.key, detail=True):
                if name := str(entry["name"]).rstrip("/").removeprefix(self.key).removeprefix("/"):
                    found[name] = None if entry["type"] == "directory" else int(entry["size"])
        return found

    def read(self, start: int, end: int) -> bytes:
        with self._asking():
            return bytes(self.fs.cat_file(self.key, start=start, end=end))

    def delete(self) -> None:
        """Delete the object and all below it, if any."""
        with contextlib.suppress(FileNotFoundError), self._asking():
            if not has_magic(self.key):
                self.fs.rm(self.key, recursive=True)
                return
            for key in self.fs.find(self.key):  # fsspec's rm would take the key for a pattern
                self.fs.rm_file(key)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            self.fs.invalidate_cache(self.key)
            yield
        except (NotImplementedError, CheckpointError):
            raise
        except Exception as error:  # each store has errors of its own
            if isinstance(error, FileNotFoundError) and not any(_NO_BUCKET.search(str(e)) for e in chain(error)):
                raise
            raise CheckpointUnreachableError(
                f"{self} can't be reached: {type(error).__name__}: {str(error).rstrip('.')}. The bucket has to be "
                "there, and its keys to list, read and write it: create it, or set keys and address as the store's "
                "package reads them."
            ) from error


Location = Path | StorePath
AnyPath = StrPath | Location


def _is_url(path: StrPath) -> bool:
    return re.match(r"\w[\w+.:-]*://", os.fspath(path)) is not None


def location(path: AnyPath, options: Mapping[str, Any] | None = None) -> Location:
    """Resolve a path or URL. ``options``: fsspec's. CheckpointError: no store, no package, or options for a path."""
    if isinstance(path, StorePath):
        return path
    if not _is_url(path):
        if options:
            raise CheckpointError(
                f"storage_options is {dict(options)!r}, but {os.fspath(path)} is a folder of the file system, which "
                "has none: remove it, or give a URL."
            )
        return Path(path)
    try:
        fs, key = url_to_fs(os.fspath(path), **(options or {}))
    except ImportError as error:
        package = str(known_implementations[os.fspath(path).partition(":")[0]]["class"]).partition(".")[0]
        raise CheckpointError(
            f"{os.fspath(path)} needs the package {package}, which is not installed: pip install {package} ({error})"
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{os.fspath(path)} names no store that fsspec reaches: {error}") from error
    if isinstance(fs, LocalFileSystem):
        return Path(key)
    if "//" in key.rstrip("/"):  # fsspec's listings find nothing below such a key
        raise CheckpointError(
            f"{os.fspath(path)} has two slashes in a row, which stores do not take for one: remove one."
        )
    return StorePath(fs, key.rstrip("/"))


def common_to_all(where: Location) -> str:
    """Name the requirement that all ranks see ``where`` alike."""
    if isinstance(where, StorePath):
        return "a store that is the same on all machines, and that nobody cleans meanwhile"
    return "a directory that all machines share"


def refuse_url(path: StrPath, unsupported: str) -> None:
    """CheckpointError if ``path`` is in an object store, which does not support this form."""
    if _is_url(path):
        raise CheckpointError(
            f"{os.fspath(path)} is of an object store, where only checkpoint directories are written and read, and not "
            f"{unsupported}: give a folder of the file system."
        )
