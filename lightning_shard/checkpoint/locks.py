"""Locks on directories, that tell those which a process is writing from those which one left behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

# Directories with the descriptors that hold their locks.
_held: dict[Path, int] = {}


def hold(directory: Path) -> None:
    """Lock a directory for as long as this process writes it; the lock ends with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)  # a filesystem without locks
    else:
        _held[directory] = descriptor


def let_go(directory: Path) -> None:
    """Unlock a directory; nothing if this process does not hold it."""
    if (descriptor := _held.pop(directory, None)) is not None:
        # Closing it is not enough: a process that was forked meanwhile (a DataLoader's worker) has it open too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a process, this one or one of another job, holds the lock of a directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
