"""Atomic publishing and removal of checkpoints, cleaning up after killed saves, and writes in the background.

A save writes into the hidden sibling ``.NAME.tmp-TOKEN`` and exchanges the two names in one step. If the filesystem
can't, the old one is ``.NAME.old-TOKEN`` for a moment, in which readers find the new one (`layout.current`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_shard.checkpoint.files import layout, stores
from lightning_shard.checkpoint.files.layout import release, try_lock
from lightning_shard.checkpoint.files.location import AnyPath, Location, StorePath, location
from lightning_shard.checkpoint.files.manifest import foreign_entries, is_checkpoint
from lightning_shard.errors import CheckpointError

# Without locks, younger leftovers may belong to a running save. With locks, the parts of a `.full.ckpt` save are
# unlocked between their completion and their use.
_IDLE_SECONDS = 600.0


def check_replaceable(path: Path) -> None:
    """CheckpointError if ``path`` is a directory with files that no checkpoint has. Files and links are replaced."""
    if path.is_dir() and not path.is_symlink() and not is_checkpoint(path) and foreign_entries(path):
        raise CheckpointError(
            f"{path} is a directory with files that no checkpoint has; saving there would delete them: choose "
            "another path"
        )


def create_temporary(path: Location, token: str) -> Location:
    """Create and return the empty temporary directory for a save to ``path``. Rank 0 calls it."""
    if isinstance(path, StorePath):
        return stores.create_folder(path, token)
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = layout.temporary_sibling(path, token)
    while True:
        temporary.mkdir()
        with contextlib.suppress(FileNotFoundError):
            lock(temporary)
        if temporary.exists():
            return temporary
        unlock(temporary)  # another job's save deleted it as a leftover before the lock


def publish_checkpoint(temporary: Location, path: Location, token: str) -> None:
    """Put the complete ``temporary`` at ``path``, then delete the old one and leftovers. Rank 0 calls it."""
    if isinstance(path, StorePath):
        stores.delete_replaced(path)
        return
    assert isinstance(temporary, Path)
    sync_directory(temporary)
    _replace(temporary, path, token)
    unlock(temporary)
    _delete_leftovers(path, temporary)
    with contextlib.suppress(OSError):
        if layout.has_locks(path.parent):
            # also the leftovers of checkpoints that are not saved again
            clean_folder(path.parent, remove=True, idle_seconds=_IDLE_SECONDS)


def _replace(temporary: Path, path: Path, token: str) -> None:
    """Rename ``temporary`` to ``path``. The old file or directory becomes a leftover."""
    check_replaceable(path)
    while not _rename_to_free_name(temporary, path) and not _exchange(temporary, path):
        aside, token = layout.temporary_sibling(path, token, layout.ASIDE), layout.new_token()
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            continue  # another job's save was faster
        try:
            if _rename_to_free_name(temporary, path):
                os.rename(aside, temporary)
                break
        except OSError:
            os.rename(aside, path)
            raise
    sync_directory(path.parent)


def _rename_to_free_name(temporary: Path, path: Path) -> bool:
    """Rename it. False if ``path`` exists: another job may have saved there a moment ago."""
    if os.path.lexists(path):
        return False
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def remove_checkpoint(path: AnyPath) -> None:
    """Delete the checkpoint at ``path``, if any, and leftovers of saves to it. It is renamed first, so that its name
    never leads to a damaged one. CheckpointError: a directory that is no checkpoint.
    """
    path = location(path)
    if isinstance(path, StorePath):
        stores.remove_stored(path)
        return
    check_replaceable(path)
    with contextlib.suppress(FileNotFoundError):  # two jobs that save in one folder may remove the same
        os.rename(path, own := layout.temporary_sibling(path, layout.new_token()))
    _delete_leftovers(path, own)


def link_checkpoint(path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
    """Make ``name`` a relative link to the checkpoint ``path``, atomically. It replaces ``name`` as a save does."""
    name, token = Path(name), layout.new_token()
    temporary = layout.temporary_sibling(name, token)
    os.symlink(os.path.relpath(path, name.parent), temporary)
    with deleted_on_failure(temporary):
        _replace(temporary, name, token)
    _delete_leftovers(name, temporary)


def _delete_leftovers(path: Path, own: Path) -> None:
    """Delete leftovers of saves to ``path``: ``own``, and unlocked ones. Without locks, old ones."""
    name = re.escape(path.name)
    with contextlib.suppress(OSError):
        # The second form is the temporary directory of a `.full.ckpt` or `.hf.ckpt` save.
        for leftover in layout.leftovers(path.parent, rf"({name}|\.{name}\.{layout.TEMPORARY}-[0-9a-f]+)"):
            if leftover == own or layout.has_locks(path.parent) or _idle_seconds(leftover) >= _IDLE_SECONDS:
                _delete_unless_locked(leftover, path)


def _idle_seconds(leftover: Path) -> float:
    return time.time() - os.lstat(leftover).st_mtime


def clean_folder(folder: AnyPath, *, remove: bool, idle_seconds: float = 0.0) -> Sequence[Location]:
    """Find, and with ``remove`` delete, leftovers of interrupted saves and removals that are ``idle_seconds`` old.

    Locked ones, which a process writes or reads, stay, as do those that readers need. On a filesystem without locks
    nobody may be saving meanwhile.
    """
    folder = location(folder)
    if isinstance(folder, StorePath):
        return stores.clean_store(folder, remove=remove)
    found = []
    for leftover in layout.leftovers(folder):
        path = leftover.with_name(leftover.name[1:].rpartition(".")[0])
        try:
            stale = _idle_seconds(leftover) >= idle_seconds and layout.current(path) != leftover
        except FileNotFoundError:
            continue  # another job's save was faster
        if stale and _delete_unless_locked(leftover, path, really=remove):
            found.append(leftover)
    return found


def _delete_unless_locked(leftover: Path, path: Path, *, really: bool = True) -> bool:
    """Delete a leftover of a save to ``path``. False if it is locked. Not ``really``: only check."""
    try:
        descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        descriptor = None  # a link
    try:
        if descriptor is not None and not try_lock(descriptor, fcntl.LOCK_EX):
            return False
        if really:
            foreign = foreign_entries(leftover) if descriptor is not None and leftover.is_dir() else []
            if foreign and path.is_file():
                return False  # there is no directory to move them to
            for entry in foreign:
                path.mkdir(exist_ok=True)
                if not (path / entry.name).exists():
                    os.rename(entry, path / entry.name)
            delete_tree(leftover)
        return True
    finally:
        if descriptor is not None:
            os.close(descriptor)


def delete_tree(path: Location) -> None:
    """Delete a file, link or directory as far as possible. The rest is a leftover for the next save."""
    if isinstance(path, StorePath):
        stores.delete_folder(path)
        return
    unlock(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def deleted_on_failure(temporary: Location, *, here: bool = True) -> Iterator[None]:
    """Delete ``temporary`` if the block fails. ``here``: this process deletes it."""
    try:
        yield
    except BaseException:
        if here:
            delete_tree(temporary)
        raise


def sizes(directory: Location) -> dict[str, int]:
    if isinstance(directory, StorePath):
        return directory.sizes()
    return {entry.name: entry.stat().st_size for entry in directory.iterdir()}


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk, if its filesystem can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step. False if there is no such call, or no file at a name any more."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.ENOENT):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


# Path to descriptor of each lock of this process. A lock tells a running save from a leftover.
_locked: dict[Path, int] = {}


def lock(directory: Path) -> None:
    """Lock a directory or file while this process writes it. The lock ends with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)  # a filesystem without locks
    else:
        _locked[directory] = descriptor


def unlock(directory: Path) -> None:
    if (descriptor := _locked.pop(directory, None)) is not None:
        release(descriptor)


class BackgroundWrite:
    """A checkpoint that a thread writes, together with the threads of other ranks."""

    def __init__(self, work: Callable[[BackgroundWrite], None]) -> None:
        """Start ``work(self)`` in a thread. It calls `mark_complete` once the checkpoint is complete."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] | None = []
        # A daemon: a rank whose peers are lost must be able to end before the backend's timeout.
        self.thread = threading.Thread(target=self._run, args=(work,), name="lightning_shard-save", daemon=True)
        _running.add(self)
        self.thread.start()

    def wait(self) -> BaseException | None:
        """Wait for the end and return its error, the same on every rank, or None."""
        self.thread.join()
        return self._failure

    def when_complete(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the checkpoint is complete, or now if it is. Never, if the save fails."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(act)
            else:
                act()

    def mark_complete(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
            for act in waiting:
                act()

    def _run(self, work: Callable[[BackgroundWrite], None]) -> None:
        try:
            work(self)
        except BaseException as error:  # `wait` returns it
            self._failure = error
        finally:
            _running.discard(self)


_running: set[BackgroundWrite] = set()


def wait_for_background_saves() -> None:
    """Wait for all saves of this process. Their errors are raised by the code that started them."""
    for write in list(_running):
        if write.thread is not threading.current_thread():
            write.wait()
