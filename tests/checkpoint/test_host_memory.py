"""The host memory that a save and a load take on each rank, beside the shard itself."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files.hashing import BLOCK
from lightning_shard.checkpoint.files.manifest import Contents, Facts
from tests.checkpoint.calls import load_into
from tests.harness import run_distributed

MIB = 2**20
M_MMAP_THRESHOLD = -3  # malloc.h
BOX, BOXES = 2 * MIB, 32
SHARD = BOX * BOXES
# A box on its way to or from a file, its bytes and the reader's, and what Python allocates for the first time.
BUFFERS = 6 * BOX
# A load hashes one block of a file while it reads the next.
READ_AHEAD = 2 * BLOCK


def status(field: str) -> int:
    found = re.search(field + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def resident() -> int:
    """The process's memory, without what was freed and glibc keeps for the next who asks."""
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def growth(work: Callable[[], None]) -> int:
    """By how much memory rose above what it was at the beginning."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return status("VmHWM") - before


def sharded(number: float) -> dict[str, Tensor]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    rows = BOX // 4 // 1024
    return {
        f"model.w{i}": DTensor.from_local(torch.full((rows, 1024), number + i), mesh, [Shard(0)]) for i in range(BOXES)
    }


def measure(folder: str) -> dict[str, int]:
    # Boxes are then mapped and unmapped one by one, where no free memory of earlier tests is large enough.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB) == 1
    tensors, saver = sharded(1.0), Saver()
    state = Contents(tensors=tensors, trainer_state={}, facts=Facts(engine="test", policy="fp32"))

    def save(name: str, background: bool) -> None:
        saver.save(f"{folder}/{name}.ckpt", lambda: state, background=background)

    save("warm", False)
    found = {"sync": growth(lambda: save("sync", False))}
    found["async"] = growth(lambda: (save("async", True), saver.finish_background_save()))
    found["async again"] = growth(lambda: (save("again", True), saver.finish_background_save()))
    before = resident()
    saver.free_buffers()
    found["given back"] = before - resident()
    other = sharded(0.0)
    found["load"] = growth(lambda: load_into(f"{folder}/again.ckpt", other))
    assert all(torch.equal(other[key].to_local(), tensor.to_local()) for key, tensor in tensors.items())
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_a_save_takes_buffers_and_one_in_the_background_a_copy_of_the_shard(tmp_path: Path) -> None:
    for found in run_distributed(measure, 2, str(tmp_path)):
        assert found["sync"] < BUFFERS, found
        assert 0.9 * SHARD < found["async"] < SHARD + BUFFERS, found
        assert found["async again"] < BUFFERS, found
        assert found["given back"] > 0.9 * SHARD, found
        assert found["load"] < BUFFERS + READ_AHEAD < SHARD, found
