"""Checkpoints on object stores, through fsspec: ``s3://``, ``gs://``, ``memory://`` and others.

A store has no rename, lock or sync, but its objects appear whole. So each save writes into a new folder,
``last.ckpt/00000007-4f00a1b2c3d4/``, and its manifest last. Readers take the highest number that has a manifest. No
object is written twice, so that no reader mixes two saves. A replaced save stays until the next replacement.

Files are uploaded in parts while they are written, and read by ranges. A copy of a folder on a disk is a checkpoint. So
is a directory that another tool copied to the store unchanged.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import BinaryIO, cast

from fsspec.spec import AbstractBufferedFile

from lightning_shard import errors
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.layout import MANIFEST, Directory
from lightning_shard.checkpoint.files.location import StorePath

_FOLDER = re.compile("[0-9]{8}-[0-9a-f]{12}")
_BUFFER_BYTES = 1 << 24  # read ahead
_OPENINGS = 20  # of a checkpoint that is replaced all the time


class StoreDirectory(Directory):
    """A folder of a store, open for reading. There is no lock: reading after two replacements is an error."""

    at_once_bytes = 1 << 62  # one request for a box of any size

    def __init__(self, path: StorePath, folder: StorePath, sizes: Mapping[str, int]) -> None:
        self.path: StorePath = path
        self._folder, self._sizes, self.unchecked = folder, dict(sizes), {}
        self.close = lambda: None

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def check_current(self) -> None:
        """Do nothing: sizes are of the folder that was opened, and reading finds a missing file."""

    def _open(self, name: str) -> BinaryIO:
        if name not in self._sizes:
            self._missing(name)
        return cast(BinaryIO, _Object(self._folder / name, self._sizes[name], partial(self._fetch, name)))

    def _fetch(self, name: str, start: int, end: int) -> bytes:
        try:
            return (self._folder / name).read(start, end)
        except FileNotFoundError:
            return self._missing(name)

    def _missing(self, name: str) -> bytes:
        if MANIFEST in self._folder.sizes():
            raise errors.CheckpointCorruptError(f"{self._folder / name} is missing")
        raise errors.CheckpointReplacedError(f"{self.path} was replaced or removed while it was read: read it again")


class _Object(AbstractBufferedFile):
    """An object as a file. ``fetch(start, end)`` returns its bytes."""

    def __init__(self, at: StorePath, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._fetch_range = fetch
        super().__init__(at.fs, at.key, block_size=_BUFFER_BYTES, size=size)


def open_store(path: StorePath) -> StoreDirectory:
    """Open the checkpoint ``path``. CheckpointNotFoundError if there is no manifest (yet)."""
    for _ in range(_OPENINGS):
        folders = _folders(path)
        for folder in folders:
            if MANIFEST in (sizes := folder.sizes()):
                return StoreDirectory(path, folder, sizes)
        if folders == _folders(path):
            break  # otherwise it was replaced twice meanwhile
    if path.is_file():
        raise errors.CheckpointError(
            f"{path} is a file, and of a store only checkpoint directories are read: copy it to a folder"
        )
    half = f"{path} is half-written: it has no {MANIFEST}, which is written last. Use an older checkpoint."
    raise errors.CheckpointNotFoundError(half if path.exists() else f"there is no checkpoint at {path}")


def _folders(path: StorePath) -> list[StorePath]:
    """Folders of saves to ``path``, newest first, then ``path`` itself, for a directory that was copied there."""
    return [*(path / name for name in sorted(path.folders(), reverse=True) if _FOLDER.fullmatch(name)), path]


def create_folder(path: StorePath, token: str) -> StorePath:
    """Choose the folder of a save to ``path`` (`commit.create_temporary`). Its number is the next one."""
    if path.is_file():
        raise errors.CheckpointError(f"{path} is a file, which a checkpoint does not replace: choose another path")
    newest, *others = _folders(path)
    number = int(newest.name[:8]) + 1 if others else 1
    return path / f"{number:08}-{token}"


def delete_folder(folder: StorePath) -> None:
    """Delete the folder of a failed save, as far as possible."""
    with contextlib.suppress(errors.CheckpointError):
        folder.delete()


def delete_replaced(path: StorePath) -> None:
    """Delete all saves to ``path`` before the last two complete ones. Later ones without a manifest may be running."""
    complete = 0
    for folder in _folders(path):
        if complete >= 2:
            _delete_save(path, folder)
        complete += MANIFEST in folder.sizes()


def remove_stored(path: StorePath) -> None:
    """Delete the checkpoint at ``path``, the newest save last. Running saves and a user's own objects stay."""
    for folder in reversed(_folders(path)):
        if MANIFEST in folder.sizes():
            _delete_save(path, folder)


def _delete_save(path: StorePath, folder: StorePath) -> None:
    (folder / MANIFEST).delete()
    if folder != path:
        folder.delete()
        return
    for name in filter(layout.is_own_name, path.sizes()):
        (path / name).delete()


def clean_store(where: StorePath, *, remove: bool) -> list[StorePath]:
    """Find, and with ``remove`` delete, what killed saves and removals left. Nobody may be saving in ``where``."""
    saves = [folder for name in where.folders() for folder in _folders(where / name)[:-1]]
    found = [folder for folder in saves if MANIFEST not in folder.sizes()]
    for folder in found if remove else ():
        folder.delete()
    return found
