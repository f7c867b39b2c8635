"""Processes that ``mpiexec`` starts train to the weights of those that Lightning starts itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

PROGRAM = """
import hashlib, sys
import torch
from lightning.pytorch import Trainer
from tests.models import Final, TinyLM, loader

torch.manual_seed(3)
final = Final()
trainer = Trainer(accelerator="cpu", devices=2, strategy="shard_fsdp", max_steps=5, callbacks=[final], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(TinyLM(), loader())
sha = hashlib.sha256()
for name, value in sorted(final.parameters.items()):
    sha.update(name.encode() + value.numpy().tobytes())
environment = type(trainer.strategy.cluster_environment).__name__
print(f"\\nrank {trainer.global_rank} of {trainer.world_size}: {environment} {sha.hexdigest()}", flush=True)
"""


@pytest.mark.matrix
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py here (pip install mpi4py impi-rt)")
@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="no mpiexec here")
def test_processes_of_mpiexec(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import lightning_shard\n" + PROGRAM)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    found = []
    for launcher in (["mpiexec", "-n", "2"], []):
        command = [*launcher, sys.executable, str(program)]
        run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        found.append(sorted(line.split(": ") for line in run.stdout.splitlines() if line.startswith("rank ")))
    assert [said for said, _ in found[0]] == [said for said, _ in found[1]] == ["rank 0 of 2", "rank 1 of 2"]
    environments = [{rest.split()[0] for _, rest in one} for one in found]
    assert environments == [{"MPIEnvironment"}, {"LightningEnvironment"}]
    assert len({rest.split()[1] for one in found for _, rest in one}) == 1
