"""What a report of a bug is given, and what it is not."""

from __future__ import annotations

import os
import re

import pytest
import torch

from lightning_shard.commands import env


def test_a_report_has_what_decides_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/nowhere/somebody")
    monkeypatch.setenv("USER", "somebody")
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
    assert env.main([]) == 0
    printed = capsys.readouterr().out
    found = env.describe(os.environ)
    assert {name: found["environment"].get(name) for name in given} == {n: shown for n, (_, shown) in given.items()}
    assert "hunter2" not in printed
    assert "somebody" not in printed
    lines = printed.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{title}:" for title in found]
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", printed, re.MULTILINE)
