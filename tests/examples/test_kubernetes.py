"""The manifest for Kubernetes: what it says fits together, and its command is one that the program takes."""

from __future__ import annotations

import shlex

import yaml

from lightning_shard.commands import slurm
from tests.harness import ROOT


def test_the_manifest_leaves_time_for_the_save() -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    seconds = next(int(v["value"]) for v in container["env"] if v["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert 30 < seconds < pod["terminationGracePeriodSeconds"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = shlex.split(container["args"][0])
    # Signals have to reach torchrun itself.
    assert words[:2] == ["exec", "torchrun"]
    assert f"--nnodes={job['spec']['completions']}" in words
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in words
    slurm.check_rest("fit", [word for word in words[words.index("fit") + 1 :] if "config" not in word][1:], cpu=False)
