"""A checkpoint that is read while saves replace it is one of them, whole, and never called damaged."""

from __future__ import annotations

import errno
import fcntl
import itertools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.layout import again_if_replaced
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.checkpoint.load import find_checkpoints
from lightning_shard.tools import convert
from tests.checkpoint.test_commit import number_in, save_number
from tests.harness import ROOT

HOW = ("exchange", "aside", "no locks")


def save_without_end(path: Path, first: int) -> None:
    for number in itertools.count(first, 2):
        save_number(path, float(number))


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def read_while_replaced(path: Path, how: str) -> None:
    """Read, by a load, a conversion and `verify`, what two processes replace, until saves of both were seen."""
    torch.set_num_threads(1)
    if how == "aside":
        commit._exchange = lambda *_: False
    if how == "no locks":
        fcntl.flock = no_locks
    save_number(path, 0.0)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=save_without_end, args=(path, first), daemon=True) for first in (1, 2)]
    for writer in writers:
        writer.start()
    seen: set[float] = set()
    for number in itertools.count():
        if number >= 5 and len(seen) >= 2:
            break
        assert all(writer.is_alive() for writer in writers), "a reader made a writer fail"
        seen.add(again_if_replaced(number_in)(path))
        verify(path)
        if number % 5 == 0:
            target = path.parent / f"{number}.ckpt"
            convert(path, target)
            seen.add(torch.load(target, weights_only=True)["n"])
            target.unlink()
            assert find_checkpoints([path.parent], "nobody").broken == ()
    for writer in writers:
        writer.kill()


@pytest.mark.matrix
def test_a_path_that_two_writers_replace(tmp_path: Path) -> None:
    """In a process without the threads that one has once it has used torch: they are lost in a fork."""
    code = (
        "from pathlib import Path; from tests.checkpoint.test_replaced import read_while_replaced as f; "
        f"[f(Path({str(tmp_path)!r}) / how / 'a.ckpt', how) for how in {HOW}]"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=600)
