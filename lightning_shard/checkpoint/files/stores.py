"""Checkpoints on object stores, through fsspec: ``s3://``, ``gs://``, ``memory://`` and others.

A store has no rename, lock or sync, but its objects appear whole. So every rank writes its files to their final place,
in a folder of this save alone: ``last.ckpt/4f00a1b2c3d4/...``. A copy of it on a disk is a checkpoint. The pointer
``last.ckpt/manifest.json``, written last, names that folder and the one before. The empty object
``.last.ckpt.tmp-4f00a1b2c3d4`` marks a running save or removal. Killed ones leave it.

No object in a folder is written twice, so that no reader mixes two saves. The folder of a replaced save stays until the
next replacement. Files are uploaded in parts while they are written, and read by ranges. A directory that another tool
copied to the store unchanged is a checkpoint too.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import BinaryIO, cast

from fsspec.spec import AbstractBufferedFile

from lightning_shard import errors
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.layout import MANIFEST, Directory
from lightning_shard.checkpoint.files.location import StorePath

_TOKEN = re.compile("[0-9a-f]{12}")
_MARKER = re.compile(r"\.(.+)\.tmp-([0-9a-f]{12})")
_BUFFER_BYTES = 1 << 24  # read ahead
_MOST_BYTES = 4096  # of a pointer
_IDLE_SECONDS = 86400.0
"""Age from which other saves in the folder delete a save's leftovers. There are no locks to tell whether it runs."""

_OPENINGS = 20  # of a checkpoint that is replaced all the time


@dataclass(frozen=True)
class _Pointer:
    """The folders of the current save and the one before. "": the files lie next to the manifest, by another tool."""

    folder: str
    before: str

    def encode(self) -> bytes:
        fields = {"format": "lightning_shard.folder", **asdict(self)}
        fields["digest"] = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return json.dumps(fields).encode() + b"\n"


def _pointer(path: StorePath) -> _Pointer | None:
    """None if there is no manifest. CheckpointCorruptError. FileNotFoundError if it was removed meanwhile."""
    size = path.entries().get(MANIFEST)
    if size is None or size > _MOST_BYTES:
        return None if size is None else _Pointer("", "")
    data = (path / MANIFEST).read(0, _MOST_BYTES)
    found = re.search(rb'"folder": "([0-9a-f]{12})", "before": "([0-9a-f]{12}|)"', data)
    if found is None:
        return _Pointer("", "")  # a manifest, or a damaged pointer, which then fails as a manifest
    pointer = _Pointer(*(group.decode() for group in found.groups()))
    if pointer.encode() != data:
        raise errors.CheckpointCorruptError(f"{path / MANIFEST} was damaged or changed after it was written")
    return pointer


class StoreDirectory(Directory):
    """A folder of a store, open for reading. There is no lock: reading after two replacements is an error."""

    at_once_bytes = 1 << 62  # one request for a box of any size

    def __init__(self, path: StorePath, folder: StorePath) -> None:
        self.path: StorePath = path
        self._folder, self.unchecked = folder, {}
        self._sizes = {name: size for name, size in folder.entries().items() if size is not None}
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
        with contextlib.suppress(FileNotFoundError):
            own = "" if self._folder == self.path else self._folder.name
            if (pointer := _pointer(self.path)) and own in (pointer.folder, pointer.before):
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
        try:
            pointer = _pointer(path)
            if pointer is None:
                break
            directory = StoreDirectory(path, path / pointer.folder if pointer.folder else path)
        except FileNotFoundError:
            continue
        if MANIFEST in directory.sizes():
            return directory  # otherwise it was replaced twice meanwhile
    else:
        raise errors.CheckpointCorruptError(f"{path / MANIFEST} names a folder that has none")
    if path.is_file():
        raise errors.CheckpointError(
            f"{path} is a file, and of a store only checkpoint directories are read: copy it to a folder"
        )
    half = f"{path} is half-written: it has no {MANIFEST}, which is written last. Use an older checkpoint."
    raise errors.CheckpointNotFoundError(half if path.entries() else f"there is no checkpoint at {path}")


def _marker(path: StorePath, token: str) -> StorePath:
    return path.parent / f".{path.name}.tmp-{token}"


def create_folder(path: StorePath, token: str) -> StorePath:
    """Return the folder for a save to ``path`` after marking it as running (`commit.create_temporary`)."""
    if path.is_file():
        raise errors.CheckpointError(f"{path} is a file, which a checkpoint does not replace: choose another path")
    _marker(path, token).write(b"")
    return path / token


def delete_folder(folder: StorePath) -> None:
    """Delete the folder of a failed save, as far as possible."""
    with contextlib.suppress(errors.CheckpointError):
        folder.delete()
        _marker(folder.parent, folder.name).delete()


def publish_folder(path: StorePath, token: str) -> None:
    """Make the complete folder of a save the checkpoint at ``path``, and delete folders that nobody reads any more."""
    old = None
    with contextlib.suppress(errors.CheckpointCorruptError, FileNotFoundError):
        old = _pointer(path)
    (path / MANIFEST).write(_Pointer(token, old.folder if old else "").encode())
    _marker(path, token).delete()
    _delete_unreferenced(path)
    clean_store(path.parent, remove=True, idle_seconds=_IDLE_SECONDS)


def remove_stored(path: StorePath) -> None:
    """Delete the checkpoint at ``path``, the pointer first. A user's own objects there stay."""
    marker = _marker(path, layout.new_token())
    marker.write(b"")
    (path / MANIFEST).delete()
    _delete_unreferenced(path)
    marker.delete()


def clean_store(folder: StorePath, *, remove: bool, idle_seconds: float = 0.0) -> list[StorePath]:
    """Find, and with ``remove`` delete, leftovers in ``folder`` (`commit.clean_folder`). Nobody may be saving there."""
    markers = _markers(folder)
    stale = [(name, token) for name, token in markers if _marker(folder / name, token).idle_seconds() >= idle_seconds]
    for name, token in stale if remove else ():
        _delete_unreferenced(folder / name, stale)
        _marker(folder / name, token).delete()
    return [folder / name / token for name, token in stale]


def _markers(folder: StorePath) -> list[tuple[str, str]]:
    """Name and token of each save or removal in ``folder`` that runs or was killed."""
    found = [_MARKER.fullmatch(name) for name, size in folder.entries().items() if size is not None]
    return [(match[1], match[2]) for match in found if match]


def _delete_unreferenced(path: StorePath, stale: Collection[tuple[str, str]] = ()) -> None:
    """Delete the objects that saves to ``path`` wrote, except for the pointer's folders and running saves that are not
    ``stale``. Objects are listed first, then markers, then the pointer: a save that wrote before the first listing has
    a marker in the second or is named by the pointer.
    """
    entries = path.entries()
    kept = {token for name, token in _markers(path.parent) if name == path.name and (name, token) not in stale}
    try:
        pointer = _pointer(path)
    except (errors.CheckpointCorruptError, FileNotFoundError):
        return  # the folders in use are unknown
    if pointer is not None:
        kept |= {pointer.folder, pointer.before}
    for name, size in entries.items():
        beside = "" not in kept and name != MANIFEST and layout.is_own_name(name)
        if beside if size is not None else _TOKEN.fullmatch(name) and name not in kept:
            (path / name).delete()
