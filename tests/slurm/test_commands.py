"""The commands of the command line on a real SLURM."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from lightning_shard.commands import init, plan, slurm
from lightning_shard.commands.slurm import script
from tests.harness import ROOT
from tests.slurm.conftest import Jobs

pytestmark = pytest.mark.slurm


def test_a_script_of_the_command_is_stopped_and_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    said = tmp_path / "said"
    arguments = f"""--nodes 2 --devices 1 --cpu --launcher torchrun --logs {tmp_path} --env PYTHONPATH={ROOT}
        --env OMP_NUM_THREADS=1 --model tests.slurm.programs.SlowAlone --model.log {said} --trainer.strategy shard_ddp
        --trainer.max_steps 80 --trainer.logger false --trainer.enable_progress_bar false
        --trainer.default_root_dir {tmp_path}/runs --time 10"""
    options, rest = slurm.parse_options(arguments.split())
    path = tmp_path / "job.sh"
    path.write_text(script(options, slurm.command_of(options, rest)))
    job = jobs.cluster.submit(path, cwd=tmp_path)
    deadline = time.monotonic() + 90
    while (not said.exists() or "train 5" not in said.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    jobs.cluster.command("scancel", "--signal=USR1", job)
    assert jobs.cluster.wait(job, "PENDING", seconds=60) == "PENDING"
    assert jobs.cluster.wait(job) == "COMPLETED"
    log = jobs.log(f"train-{job}")
    assert log.count("goes back into the queue") == 1
    stopped = re.findall(r"stopped by SIGUSR1 after step (\d+)", log)
    assert len(stopped) == 1
    assert f"goes on from step {stopped[0]}" in log
    steps = [int(step) for step in re.findall(r"^train (\d+)", said.read_text(), re.MULTILINE)]
    assert steps == list(range(80))


def test_doctor(jobs: Jobs, tmp_path: Path) -> None:
    import sys

    line = f"srun {sys.executable} -m lightning_shard doctor --megabytes 1 --folder {tmp_path}; echo code $?"
    job = jobs.submit(jobs.script(line), "--nodes=2", "--ntasks-per-node=1")
    assert jobs.cluster.wait(job) == "COMPLETED"
    log = jobs.log(job)
    assert re.search(r"^lsh1 +0 +1 cpu +3\.\d+\.\d+ +2\.\S+ +2\.\S+ +- +\d+\.\d\d$", log, re.MULTILINE), log
    assert re.search(r"^lsh2 +1 +1 cpu ", log, re.MULTILINE)
    assert re.search(r"^(nothing is odd|odd: slow link.*)$", log, re.MULTILINE)
    assert re.search(r"^code [01]$", log, re.MULTILINE)


def test_init_plan_slurm_and_sbatch_take_one_file(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = ["devices=2x1 cpu", "slurm=yes", "engine=shard_fsdp_aligned", "precision=bf16-mixed"]
    assert init.main(["--output", "run.yaml", "--answers", "train=quickstart", *answers]) == 0
    launch = "lightning-shard slurm --config run.yaml --submit"
    assert f"train with: {launch}" in capsys.readouterr().out
    assert plan.main(["--device-memory", "4GB", "--config", "run.yaml"]) == 0
    assert "2 x 1 devices" in capsys.readouterr().out
    words = launch.split()[2:-1]
    environ = ["--env", f"PYTHONPATH={ROOT}", "--env", "OMP_NUM_THREADS=1"]
    assert slurm.main([*words, *environ, "--logs", str(tmp_path), "--output", "job.sh"]) == 0
    job = jobs.cluster.submit(tmp_path / "job.sh", cwd=tmp_path)
    assert jobs.cluster.wait(job) == "COMPLETED"
    assert re.search(r"^(0: )?checkpoint: runs/", jobs.log(f"train-{job}"), re.MULTILINE)
