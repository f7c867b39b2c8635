"""Forks of processes that have threads of a communication backend: DataLoader workers.

Before Python 3.12 a forked child waits forever if another thread is about to enter the interpreter at that moment: it
holds a lock of the runtime, and memory that it asks for is not given before the fork is done, so that the child begins
with the lock taken (seen in ``_PyThreadState_DeleteExcept``, out of ``PyOS_AfterFork_Child``). gloo's threads enter the
interpreter when they let go of a tensor whose Python object has gone, right after a collective, which is where loaders
are started.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

_SECONDS = 0.01  # far more than a thread needs to let go of a tensor
_registered = False


def let_threads_finish_before_forks() -> None:
    """Have each later fork of this process wait a moment, without the interpreter's lock, where it is needed."""
    global _registered
    if not _registered and sys.version_info < (3, 12):
        _registered = True
        os.register_at_fork(before=_let_threads_finish)


def _let_threads_finish() -> None:
    if dist.is_available() and dist.is_initialized():
        time.sleep(_SECONDS)
