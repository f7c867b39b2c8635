"""The manifest for Kubernetes: what it says fits together, and its command is one that the program takes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_shard.commands import slurm
from tests.harness import ROOT


def _manifest() -> tuple[Any, Any, Any, Any]:
    """Service, job, pod and container."""
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return service, job, pod, container


def test_the_manifest_leaves_time_for_the_save() -> None:
    service, job, pod, container = _manifest()
    seconds = next(int(v["value"]) for v in container["env"] if v["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert 30 < seconds < pod["terminationGracePeriodSeconds"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = shlex.split(container["args"][0])
    # Signals have to reach torchrun itself.
    assert words[:2] == ["exec", "torchrun"]
    assert f"--nnodes={job['spec']['completions']}" in words
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in words
    # The pod's configuration is not here.
    rest = [word for word in words[words.index("fit") + 1 :] if "config" not in word][1:]
    slurm.check_rest("fit", [*rest, "--model=Model"])


def _pod(folder: Path) -> subprocess.Popen[str]:
    """The container's command as the first process of a PID namespace, as in a pod: one node of two CPU processes."""
    _, _, _, container = _manifest()
    (args,) = container["args"]
    for there, here in {
        "--nnodes=2": "--nnodes=1",
        "--nproc-per-node=8": "--nproc-per-node=2",
        "--master-addr=train-0.train": "--master-addr=127.0.0.1",
        "--config /runs/hybrid.yaml": f"--config {folder}/hybrid.yaml",
        "=/runs": f"={folder}",
        "--trainer.num_nodes=2 --trainer.devices=8": "--trainer.num_nodes=1 --trainer.devices=2",
    }.items():
        assert there in args
        args = args.replace(there, here)
    environ = {**os.environ, "JOB_COMPLETION_INDEX": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {each["name"]: each["value"] for each in container["env"]}
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *container["command"], args]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder, text=True)


@pytest.mark.matrix
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_pod_that_is_evicted_has_saved_before_its_grace_period_ends(tmp_path: Path) -> None:
    """SIGTERM to the first process alone, as the kubelet sends it, and no other signal."""
    _, _, pod, _ = _manifest()
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config["trainer"] |= {"strategy": {"class_path": "lightning_shard.ShardFSDPStrategy"}, "val_check_interval": 10**6}
    config["trainer"]["callbacks"] = []
    config["model"]["init_args"] |= {"layers": 1, "width": 32, "max_length": 32}
    config["data"]["init_args"]["seq_len"] = 32
    (tmp_path / "hybrid.yaml").write_text(yaml.safe_dump(config))
    steps = []
    for _ in range(2):
        process = _pod(tmp_path)
        try:
            begun = time.monotonic()
            while not _trains(tmp_path, after=steps) and time.monotonic() < begun + 120:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            process.wait(timeout=pod["terminationGracePeriodSeconds"])
        finally:
            process.kill()
        saved = list(tmp_path.rglob("manifest.json"))
        assert saved, (tmp_path / "log").read_text()
        steps.append(max(yaml.safe_load(path.read_text())["run"]["step"] for path in saved))
    assert 0 < steps[0] < steps[1] < config["trainer"]["max_steps"]
    assert f"Run train goes on from step {steps[0]}" in (tmp_path / "log").read_text()


def _trains(folder: Path, after: list[int]) -> bool:
    """Whether the newest fit has logged a step of its own."""
    tables = [path.read_text().splitlines() for path in folder.rglob("metrics.csv")]
    return len(tables) > len(after) and all(len(lines) > 2 for lines in tables)
