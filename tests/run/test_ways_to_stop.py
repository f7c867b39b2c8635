"""Real processes of which one is killed or stopped: every other that can run ends in time, wherever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, free_port, until

LOST_SECONDS = 6.0
RANK = """
import sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from lightning_shard.cluster.preflight import Place, connect
from lightning_shard.cluster.watch import Watch

rank, where = int(sys.argv[1]), sys.argv[3]
place = Place(address="127.0.0.1", port=int(sys.argv[2]), rank=rank, world_size=3)
store = connect(place, 60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
Watch(place, float(sys.argv[4])).start()

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        time.sleep(600)

dist.barrier()
open(sys.argv[5] + f"/{rank}", "w").close()
if where == "collective" and rank != int(sys.argv[6]):
    dist.all_reduce(torch.zeros(1))
elif where == "loader":
    next(iter(DataLoader(Slow(), num_workers=1)))
time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("where", ["python", "collective", "loader"])
def test_all_others_end_in_time(where: str, how: signal.Signals, victim: int, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    port = free_port()
    words = [where, str(LOST_SECONDS), str(tmp_path), str(victim)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(port), *words], env=environ) for rank in range(3)
    ]
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 3)
        time.sleep(1.5)
        ranks[victim].send_signal(how)
        start = time.monotonic()
        others = [process for rank, process in enumerate(ranks) if rank != victim]
        until(lambda: all(process.poll() is not None for process in others), LOST_SECONDS + 10)
        print(f"{where}, {how.name}, rank {victim}: {time.monotonic() - start:.1f} s")
        assert all(process.returncode != 0 for process in others)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
