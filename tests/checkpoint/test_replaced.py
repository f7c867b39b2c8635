"""A checkpoint that is read while saves replace it is one of them, whole, and never called damaged."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.checkpoint.load import find_checkpoints
from tests.checkpoint.compare import stored
from tests.checkpoint.test_commit import number_in, save_number
from tests.harness import ROOT


def save_without_end(path: Path, first: int) -> None:
    for number in itertools.count(first, 2):
        save_number(path, float(number))


def read_while_replaced(path: Path, reads: int, least: int, exchange: bool) -> None:
    """Read, at least ``reads`` times and until ``least`` saves were seen, what two processes replace.

    By a load, by a conversion's reader and by `verify`. How soon the processes save is the machine's affair.
    """
    torch.set_num_threads(1)
    if not exchange:
        commit._exchange = lambda *_: False
    save_number(path, 0.0)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=save_without_end, args=(path, first), daemon=True) for first in (1, 2)]
    for writer in writers:
        writer.start()
    seen: set[float] = set()
    for number in itertools.count():
        if number >= reads and len(seen) >= least:
            break
        assert all(writer.is_alive() for writer in writers), "a reader made a writer fail"
        seen.add(number_in(path))
        verify(path)
        if number % 5 == 0:
            (value,) = {v for key, t in stored(path).items() if "w" in key for v in t.tolist()}
            seen.add(value)
            assert find_checkpoints([path.parent], "nobody").broken == ()
    for writer in writers:
        writer.kill()


def in_a_process(folder: Path, reads: int, least: int) -> None:
    """Without the threads that a process has once it has used torch: they are lost in a fork."""
    code = (
        "from pathlib import Path; from tests.checkpoint.test_replaced import read_while_replaced as f; "
        f"[f(Path({str(folder)!r}) / str(exchange), {reads}, {least}, exchange) for exchange in (True, False)]"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=600)


def test_a_path_that_two_writers_replace(tmp_path: Path) -> None:
    in_a_process(tmp_path, 2, 2)


@pytest.mark.soak
def test_a_path_that_two_writers_replace_a_thousand_times(tmp_path: Path) -> None:
    in_a_process(tmp_path, 1000, 100)
