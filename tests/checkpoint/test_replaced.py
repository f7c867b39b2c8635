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
from lightning_shard.errors import CheckpointNotFoundError
from lightning_shard.tools import convert
from tests.checkpoint.test_commit import number_in, save_number
from tests.harness import ROOT

HOW = ("exchange", "aside", "renamed", "no locks")


def save_without_end(path: Path, first: int) -> None:
    for number in itertools.count(first, 2):
        save_number(path, float(number))


def rename_without_end(path: Path) -> None:
    """As by hand: the checkpoint is away for a moment."""
    while True:
        os.rename(path, path.with_name("moved"))
        os.rename(path.with_name("moved"), path)


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def read_while_replaced(path: Path, reads: int, least: int, how: str) -> None:
    """Read, at least ``reads`` times and until ``least`` saves were seen, what two processes replace or rename.

    By a load, by a conversion and by `verify`. How soon the processes save is the machine's affair.
    """
    torch.set_num_threads(1)
    if how == "aside":
        commit._exchange = lambda *_: False
    if how == "no locks":
        fcntl.flock = no_locks
    save_number(path, 0.0)
    fork = multiprocessing.get_context("fork")
    if how == "renamed":
        least, writers = 1, [fork.Process(target=rename_without_end, args=(path,), daemon=True)]
    else:
        writers = [fork.Process(target=save_without_end, args=(path, first), daemon=True) for first in (1, 2)]
    for writer in writers:
        writer.start()
    seen: set[float] = set()
    for number in itertools.count():
        if number >= reads and len(seen) >= least:
            break
        assert all(writer.is_alive() for writer in writers), "a reader made a writer fail"
        try:
            seen.add(again_if_replaced(number_in)(path))
            verify(path)
            if number % 5 == 0:
                target = path.parent / f"{number}.ckpt"
                convert(path, target)
                seen.add(torch.load(target, weights_only=True)["n"])
                target.unlink()
                assert find_checkpoints([path.parent], "nobody").broken == ()
        except CheckpointNotFoundError as error:
            # The other process may have to wait for a processor while it has renamed it.
            if how != "renamed" or "there is no checkpoint at" not in str(error):
                raise
    for writer in writers:
        writer.kill()


def in_a_process(folder: Path, reads: int, least: int) -> None:
    """Without the threads that a process has once it has used torch: they are lost in a fork."""
    code = (
        "from pathlib import Path; from tests.checkpoint.test_replaced import read_while_replaced as f; "
        f"[f(Path({str(folder)!r}) / how / 'a.ckpt', {reads}, {least}, how) for how in {HOW}]"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=600)


@pytest.mark.matrix
def test_a_path_that_two_writers_replace(tmp_path: Path) -> None:
    in_a_process(tmp_path, 5, 2)


@pytest.mark.soak
def test_a_path_that_two_writers_replace_a_thousand_times(tmp_path: Path) -> None:
    in_a_process(tmp_path, 1000, 100)
