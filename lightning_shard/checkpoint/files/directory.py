"""A checkpoint directory that is open for reading: its files are those of one save, whatever replaces its path."""

import contextlib
import fcntl
import hashlib
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from lightning_shard.checkpoint.files.layout import MANIFEST, FileEntry, check_relative, current
from lightning_shard.checkpoint.files.place import Place
from lightning_shard.errors import CheckpointCorruptError, CheckpointError

_BLOCK = 1 << 22
_PATIENCE_SECONDS = 10.0


class Directory:
    """A directory and a shared lock on it; every file is opened through the directory's descriptor.

    A save that replaces the path meanwhile, or a removal, leaves a locked directory alone. On a filesystem without
    locks its files may be deleted; reading on is then an error that says so. The lock ends with this object.
    """

    at_once_bytes = 1 << 20
    """Of a box, up to which it is read by one call."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path: Place = path
        self.descriptor = descriptor
        self._unchecked: dict[str, FileEntry] = {}
        self.close: Callable[[], object] = weakref.finalize(self, release, descriptor)
        """Let go of it now; else with this object, which a traceback may keep."""

    def sizes(self) -> dict[str, int]:
        """Name to bytes of each regular file in it."""
        with os.scandir(self.descriptor) as entries:
            return {e.name: e.stat(follow_symlinks=False).st_size for e in entries if e.is_file(follow_symlinks=False)}

    def compare(self, files: Mapping[str, FileEntry]) -> None:
        """From here on compare each of ``files`` with its size and checksum when it is first opened."""
        self._unchecked.update(files)

    def open(self, name: str) -> BinaryIO:
        """Open a regular file that lies in the directory; a link, a pipe or a device is never opened.

        Raises CheckpointCorruptError for all else and for a missing file, CheckpointError where the directory was
        replaced on a filesystem without locks.
        """
        check_relative(name)
        stream = self._open(name)
        if (entry := self._unchecked.pop(name, None)) is not None:
            self.check(name, entry)
        return stream

    def _open(self, name: str) -> BinaryIO:
        where = self.path / name
        try:
            # A pipe would block and a device may act when it is opened; a link leads anywhere.
            kind = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
            if "/" in name or not stat.S_ISREG(kind):
                raise CheckpointCorruptError(f"{where} is not a regular file inside the checkpoint")
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.fdopen(os.open(name, flags, dir_fd=self.descriptor), "rb")
        except OSError as error:
            self._check_current()
            raise CheckpointCorruptError(f"{where} can't be read ({error.strerror})") from error

    def check(self, name: str, entry: FileEntry, take: Callable[[bytes], object] | None = None) -> None:
        """Compare a file with its size and checksum; ``take`` is called with its bytes. Errors as of `open`."""
        where, digest = self.path / name, hashlib.sha256()
        with self.open(name) as stream:
            if (size := stream.seek(0, os.SEEK_END)) != entry.size:
                raise CheckpointCorruptError(f"{where} has {size} bytes, {MANIFEST} says {entry.size}")
            stream.seek(0)
            try:
                while block := stream.read(_BLOCK):
                    digest.update(block)
                    if take is not None:
                        take(block)
            except OSError as error:
                self._check_current()
                raise CheckpointCorruptError(f"{where} can't be read: {error}") from error
        if digest.hexdigest() != entry.sha256:
            raise CheckpointCorruptError(
                f"{where} does not match its checksum: it was damaged or changed after it was written"
            )

    def read(self, name: str, files: Mapping[str, FileEntry]) -> bytes:
        """The contents of one of ``files`` after `check`: the bytes that were checked are those that are returned."""
        if name not in files:
            raise CheckpointCorruptError(f"{self.path}: the manifest does not list {name}")
        blocks: list[bytes] = []
        self.check(name, files[name], blocks.append)
        return b"".join(blocks)

    def damaged(self, names: Iterable[str], files: Mapping[str, FileEntry]) -> dict[str, str]:
        """Which of the files ``names`` are not as ``files`` lists them, and what is wrong with each."""
        damage: dict[str, str] = {}
        for name in names:
            try:
                self.check(name, files[name])
            except CheckpointCorruptError as error:
                damage[name] = str(error)
        return damage

    def _check_current(self) -> None:
        if not _is_at(Path(str(self.path)), self.descriptor):
            raise CheckpointError(f"{self.path} was replaced or removed while it was read: read it again")


def open_directory(path: str | os.PathLike[str], *, lock: bool = True) -> Directory:
    """Open the directory ``path``, or what an interrupted replacement of it left; nothing on the disk is changed."""
    path, patience, missing = Path(path), time.monotonic() + _PATIENCE_SECONDS, 0
    while True:
        place = current(path)
        try:
            directory = Directory(path, os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            # Between two looks at the names saves may have changed them twice, but hardly each time.
            missing = missing + 1 if current(path) == path and not path.exists() else 0
            if missing == 3:
                raise
            continue
        # A save has the lock of what it is putting in place right now.
        locked = not lock or try_lock(directory.descriptor, fcntl.LOCK_SH)
        # What was replaced ahead of the lock may be deleted by now.
        if locked and _is_at(place, directory.descriptor):
            return directory
        if time.monotonic() > patience:
            raise CheckpointError(f"{path} was replaced or locked by a save for {_PATIENCE_SECONDS:.0f} s")
        time.sleep(0.002)


def try_lock(descriptor: int, how: int) -> bool:
    """Take a lock (``fcntl.LOCK_SH`` or ``LOCK_EX``); False while another process has one that excludes it."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a filesystem without locks
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def release(descriptor: int) -> None:
    """Give a lock back and close its descriptor."""
    with contextlib.suppress(OSError):
        # Closing it is not enough: a process that was forked meanwhile (a DataLoader's worker) has it open too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
