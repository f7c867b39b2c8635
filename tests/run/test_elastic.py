"""torchrun with ``--nnodes 1:2`` goes on with the nodes that there are, and a step keeps its samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, free_port, until

PROGRAM = """
import json, os, sys, time
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_shard import PreemptionConfig, ShardFSDPStrategy
from tests.models import TinyLM, loader

folder = sys.argv[1]

class Slow(TinyLM):
    def training_step(self, batch, batch_idx):
        time.sleep(0.2)
        with open(f"{folder}/batches", "a") as file:
            print(json.dumps([os.getppid(), os.getpid(), self.trainer.world_size, self.trainer.num_nodes,
                self.global_step, self.trainer.accumulate_grad_batches]), file=file)
        return super().training_step(batch, batch_idx)

torch.manual_seed(1)
settings = PreemptionConfig(run="mine", keep_batch=True)
saves = ModelCheckpoint(f"{folder}/checkpoints", "{step}", every_n_train_steps=2, save_top_k=1)
Trainer(
    accelerator="cpu", devices=1, num_nodes=2, max_steps=STEPS, callbacks=[saves], logger=False,
    default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
    strategy=ShardFSDPStrategy(preemption=settings, lost_rank_seconds=10),
).fit(Slow(), loader(), ckpt_path="auto")
"""


def _batches(folder: Path) -> list[list[int]]:
    path = folder / "batches"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.matrix
def test_torchrun_goes_on_with_the_nodes_that_there_are(tmp_path: Path) -> None:
    program, port = tmp_path / "program.py", free_port()
    program.write_text(PROGRAM.replace("STEPS", "60"))
    conf = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,is_host="
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=mine"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=5"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Else torchrun 2.13 never tells a node that joins later where the others meet.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agents: list[subprocess.Popen[bytes]] = []

    def start(host: int) -> subprocess.Popen[bytes]:
        own = [*command, f"--rdzv-conf={conf}{host}", str(program), str(tmp_path)]
        with (tmp_path / f"log-{len(agents)}").open("wb") as log:
            agents.append(subprocess.Popen(own, env=environ, stdout=log, stderr=log))
        return agents[-1]

    try:
        first, second = start(1), start(0)
        until(lambda: any(batch[2] == 2 and batch[4] >= 5 for batch in _batches(tmp_path)), 400)
        workers = {batch[1] for batch in _batches(tmp_path) if batch[0] == second.pid}
        for process in (second.pid, *workers):
            os.kill(process, signal.SIGKILL)
        # On one node alone, from a checkpoint.
        until(lambda: any(batch[2] == 1 for batch in _batches(tmp_path)), 300)
        start(0)
        until(lambda: first.poll() is not None, 500)
        assert first.returncode == 0, (tmp_path / "log-0").read_text()[-4000:]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
    ranks = {(batch[2], batch[3], batch[5]) for batch in _batches(tmp_path)}
    # World size, number of nodes, micro-batches of a step on each rank.
    assert ranks == {(2, 2, 1), (1, 1, 2)}
    assert _batches(tmp_path)[-1][2] == 2, "the node that came back takes part"
    said = (tmp_path / "log-0").read_text()
    assert "accumulate_grad_batches is 2, and not 1" in said
    assert "num_nodes is 1, as torchrun has started the processes, and not 2" in said
    steps = [batch[4] for batch in _batches(tmp_path)]
    assert set(steps) == set(range(60))
