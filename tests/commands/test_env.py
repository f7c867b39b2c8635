"""What a report of a bug is given, and what it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_shard.commands import env
from lightning_shard.engines.zero import kernels


def test_a_report_has_what_decides_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/nowhere/somebody")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_lion").mkdir()
    (tmp_path / "cpu_lion" / "cpu_lion.so").touch()
    given = {
        "NCCL_DEBUG": ("INFO", "INFO"),
        "SLURM_CLUSTER": ("somebody@login", "(set)"),
        "SLURM_JOB_USER": ("somebody", "(set)"),
        "SLURM_JOB_NUM_NODES": ("2", "2"),
        "TORCH_HOME": ("/nowhere/somebody/torch", "~/torch"),
        "DS_API_TOKEN": ("hunter2", "(set)"),
        "UNRELATED": ("hunter2", None),
    }
    for name, (value, _) in given.items():
        monkeypatch.setenv(name, value)
    assert env.main(["--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert {name: found["environment"].get(name) for name in given} == {n: shown for n, (_, shown) in given.items()}
    assert "hunter2" not in printed
    assert "somebody" not in printed
    assert found["versions"]["torch"] == torch.__version__
    assert found["kernels of DeepSpeed"].keys() == kernels.BUILDERS.keys()
    assert found["kernels of DeepSpeed"]["cpu_lion"] == "compiled"
    assert any("nodes were virtual" in line for line in found["never run on such a machine"])


def test_the_text_has_the_same_titles(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "states", lambda device: {})
    assert env.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{title}:" for title in env.describe({})]
    assert f"  python           {env.describe({})['versions']['python']}" in lines
