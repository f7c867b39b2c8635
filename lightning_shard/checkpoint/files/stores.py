"""Checkpoints on object stores, through fsspec: ``s3://``, ``gs://``, ``memory://`` and its kin.

A store has no rename, no lock and no sync, but objects that appear whole. So every rank writes its files to where they
stay, below a folder of this save alone: ``last.ckpt/4f00a1b2c3d4/...``, which copied to a disk is a checkpoint.
``last.ckpt/manifest.json``, written last, names that folder and the one before. An empty object
``.last.ckpt.tmp-4f00a1b2c3d4`` is there while that save, or a removal, goes on: killed ones leave it.

Below a folder nothing is written twice, so that no reader mixes two saves, and what a replacement leaves stays until
the next one. Files go up in parts while they are written, and are read by ranges. A directory that another tool copied
to the store as it is is a checkpoint too.
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
_BUFFER_BYTES = 1 << 24  # of what is read ahead
_MOST_BYTES = 4096  # of a pointer
_IDLE_SECONDS = 86400.0
"""There are no locks: what began longer ago was killed, and may be deleted by other saves in the folder."""

_OPENINGS = 20  # of a checkpoint that is replaced all the time


@dataclass(frozen=True)
class _Pointer:
    """Which folder is the checkpoint, and which was before; "": the files lie beside it, as another tool put them."""

    folder: str
    before: str

    def encode(self) -> bytes:
        fields = {"format": "lightning_shard.folder", **asdict(self)}
        fields["digest"] = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return json.dumps(fields).encode() + b"\n"


def _pointer(path: StorePath) -> _Pointer | None:
    """None where there is no manifest. CheckpointCorruptError, and FileNotFoundError where it was removed meanwhile."""
    size = path.entries().get(MANIFEST)
    if size is None or size > _MOST_BYTES:
        return None if size is None else _Pointer("", "")
    data = (path / MANIFEST).read(0, _MOST_BYTES)
    found = re.search(rb'"folder": "([0-9a-f]{12})", "before": "([0-9a-f]{12}|)"', data)
    if found is None:
        return _Pointer("", "")  # or damaged, and no manifest then
    pointer = _Pointer(*(group.decode() for group in found.groups()))
    if pointer.encode() != data:
        raise errors.CheckpointCorruptError(f"{path / MANIFEST} was damaged or changed after it was written")
    return pointer


class StoreDirectory(Directory):
    """A folder of a store that is open for reading. There is no lock: what two saves replaced since is an error."""

    at_once_bytes = 1 << 62  # One request for a box, whatever its size.

    def __init__(self, path: StorePath, folder: StorePath) -> None:
        self.path: StorePath = path
        self._folder, self.unchecked = folder, {}
        self._sizes = {name: size for name, size in folder.entries().items() if size is not None}
        self.close = lambda: None

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def check_current(self) -> None:
        """What it was opened as has the sizes that it had; a file that is gone is told when it is read."""

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
    """An object as a file, of which ``fetch`` gives ranges."""

    def __init__(self, at: StorePath, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._fetch_range = fetch
        super().__init__(at.fs, at.key, block_size=_BUFFER_BYTES, size=size)


def open_store(path: StorePath) -> StoreDirectory:
    """Open the checkpoint ``path``; CheckpointNotFoundError where there is no manifest, or none yet."""
    for _ in range(_OPENINGS):
        try:
            pointer = _pointer(path)
            if pointer is None:
                break
            directory = StoreDirectory(path, path / pointer.folder if pointer.folder else path)
        except FileNotFoundError:
            continue
        if MANIFEST in directory.sizes():
            return directory  # else it was replaced twice in between
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


def begin(path: StorePath, token: str) -> StorePath:
    """The folder for a save to ``path``; as `commit.create_temporary`."""
    if path.is_file():
        raise errors.CheckpointError(f"{path} is a file, which a checkpoint does not replace: choose another path")
    _marker(path, token).write(b"")
    return path / token


def give_up(folder: StorePath) -> None:
    """Delete what a save has written that failed, as far as that is possible."""
    with contextlib.suppress(errors.CheckpointError):
        folder.delete()
        _marker(folder.parent, folder.name).delete()


def publish(path: StorePath, token: str) -> None:
    """Make the complete folder of a save the checkpoint at ``path``, and delete what nobody reads any more."""
    old = None
    with contextlib.suppress(errors.CheckpointCorruptError, FileNotFoundError):
        old = _pointer(path)
    (path / MANIFEST).write(_Pointer(token, old.folder if old else "").encode())
    _marker(path, token).delete()
    _tidy(path)
    clean(path.parent, remove=True, idle_seconds=_IDLE_SECONDS)


def remove(path: StorePath) -> None:
    """Delete the checkpoint at ``path``, first what makes it one; a user's own objects there stay."""
    marker = _marker(path, layout.new_token())
    marker.write(b"")
    (path / MANIFEST).delete()
    _tidy(path)
    marker.delete()


def clean(folder: StorePath, *, remove: bool, idle_seconds: float = 0.0) -> list[StorePath]:
    """What killed saves and removals left in ``folder``, as `commit.clean_folder`; nobody may have saved there since."""
    markers = _markers(folder)
    stale = [(name, token) for name, token in markers if _marker(folder / name, token).idle_seconds() >= idle_seconds]
    for name, token in stale if remove else ():
        _tidy(folder / name, stale)
        _marker(folder / name, token).delete()
    return [folder / name / token for name, token in stale]


def _markers(folder: StorePath) -> list[tuple[str, str]]:
    """Name of each checkpoint in ``folder`` that is being saved or removed, or was when that ended, and the token."""
    found = [_MARKER.fullmatch(name) for name, size in folder.entries().items() if size is not None]
    return [(match[1], match[2]) for match in found if match]


def _tidy(path: StorePath, stale: Collection[tuple[str, str]] = ()) -> None:
    """Delete all of ``path`` that saves wrote, but what its pointer names and what is being saved, but for ``stale``
    saves. In this order: what a save had written before the listing has its marker, or else its pointer, after it.
    """
    entries = path.entries()
    kept = {token for name, token in _markers(path.parent) if name == path.name and (name, token) not in stale}
    try:
        pointer = _pointer(path)
    except (errors.CheckpointCorruptError, FileNotFoundError):
        return  # It can't be told.
    if pointer is not None:
        kept |= {pointer.folder, pointer.before}
    for name, size in entries.items():
        beside = "" not in kept and name != MANIFEST and layout.is_own_name(name)
        if beside if size is not None else _TOKEN.fullmatch(name) and name not in kept:
            (path / name).delete()
