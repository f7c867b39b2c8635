"""Ranks and savers that are killed: a whole checkpoint is there, whenever it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import tensor_files
from tests.checkpoint.test_commit import number_in, save_number
from tests.groups import sampled
from tests.harness import ROOT, DistributedError, run_distributed


def die_while_saving(path: str, dying_rank: int) -> None:
    if dist.get_rank() == dying_rank:
        tensor_files.HashedFile.write = die  # type: ignore[method-assign]
    save_number(path, 2.0)


def die(self: object, data: bytes) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize("dying_rank", sampled([0, 1], 1))
def test_a_rank_that_dies_fails_the_others_and_the_old_one_stays(tmp_path, dying_rank):
    path = tmp_path / "a.ckpt"
    save_number(path, 1.0)
    with pytest.raises(DistributedError) as caught:
        run_distributed(die_while_saving, 2, str(path), dying_rank, timeout=60)
    # A rank that waited for the dead one would be "did not end".
    assert caught.value.failed == {dying_rank: "died", 1 - dying_rank: "CheckpointError"}
    assert "lost contact with another rank" in str(caught.value)
    assert number_in(path) == 1.0
    save_number(path, 3.0)
    assert number_in(path) == 3.0
    assert os.listdir(tmp_path) == ["a.ckpt"]


def save_until_killed(path: str, rounds: int) -> None:
    """Fork a process that saves without end in the background, and kill it at a random moment, ``rounds`` times."""
    torch.set_num_threads(1)
    chance, number = random.Random(0), 0.0
    for _ in range(rounds):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            saver = Saver()
            save_number(path, number + 1.0, size=20_000, saver=saver)
            while True:
                os.write(tell, b"%d\n" % int(number + 1.0))
                number += 1.0
                # The one before is whole when this returns.
                save_number(path, number + 1.0, size=20_000, saver=saver, background=True)
        os.close(tell)
        lines = os.read(ready, 1)  # it has saved at least once and is in the midst of the next
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while part := os.read(ready, 1 << 16):
            lines += part
        os.close(ready)
        number, told = number_in(Path(path)), max(float(line) for line in lines.split())
        assert told - 1.0 <= number <= told + 1.0, (told, number)


@pytest.mark.matrix
def test_killed_at_random_moments_a_whole_one_is_there(tmp_path):
    path, rounds = tmp_path / "a.ckpt", 10
    code = f"from tests.checkpoint.test_kills import save_until_killed as f; f({str(path)!r}, {rounds})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path, timeout=120 + 6 * rounds)
    save_number(path, 1.0)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]
