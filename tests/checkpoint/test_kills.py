"""A rank that is killed in a save: a whole checkpoint is there."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from lightning_shard.checkpoint.files import tensor_files
from tests.checkpoint.test_commit import number_in, save_number
from tests.groups import sampled
from tests.harness import DistributedError, run_distributed


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
