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
import os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from lightning_shard.cluster.preflight import Rendezvous, connect_store
from lightning_shard.cluster.watch import RankWatch

rank, where = int(sys.argv[1]), sys.argv[3]
place = Rendezvous(address="127.0.0.1", port=int(sys.argv[2]), rank=rank, world_size=3)
through = place if len(sys.argv) < 8 else Rendezvous(
    address="127.0.0.1", port=int(sys.argv[7]), rank=rank, world_size=3
)
store = connect_store(place, 60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
RankWatch(through, float(sys.argv[4]), exit_process=os._exit).start_threads()

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


NETWORK = """
import socket, sys, threading
def pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
def carry(here):
    there = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    threading.Thread(target=pump, args=(here, there)).start()
    pump(there, here)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    while True:
        threading.Thread(target=carry, args=(server.accept()[0],)).start()
"""


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [None, signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("where", ["python", "collective", "loader"])
def test_all_others_end_in_time(where: str, how: signal.Signals | None, victim: int, tmp_path: Path) -> None:
    """``how`` None cuts a network: a process that carries the bytes of the victim, or of all to rank 0, is stopped."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    port, carried = free_port(), free_port()
    command = [sys.executable, "-c", NETWORK, str(carried), str(port)]
    network = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert network.stdout is not None
    network.stdout.readline()
    words = [where, str(LOST_SECONDS), str(tmp_path), str(victim)]
    ranks = []
    for rank in range(3):
        through = [str(carried)] if how is None and (rank == victim or victim == 0) and rank > 0 else []
        command = [sys.executable, "-c", RANK, str(rank), str(port), *words, *through]
        ranks.append(subprocess.Popen(command, env=environ))
    others = [process for rank, process in enumerate(ranks) if how is None or rank != victim]
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 3)
        time.sleep(1.5)
        (network if how is None else ranks[victim]).send_signal(how or signal.SIGSTOP)
        until(lambda: all(process.poll() is not None for process in others), LOST_SECONDS + 10)
        assert all(process.returncode != 0 for process in others)
    finally:
        for process in [*ranks, network]:
            process.kill()
            process.wait()
