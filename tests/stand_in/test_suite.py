"""Tests of the engines pass on the stand-in for a GPU too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.harness import ROOT

SUITES = [
    ["tests/stand_in/test_device.py", "tests/stand_in/test_groups.py", "tests/engines/test_dtensor_refusals.py"],
    ["tests/strategies"],
    # Their own collectives, and those of stock strategies beside them, are of tensors on the CPU.
    ["tests/checkpoint", "tests/resume"],
    ["tests/run", "tests/callbacks", "tests/engines", "tests/precision", "tests/meters", "tests/tensors"],
]


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("c++") is None or shutil.which("ninja") is None, reason="compiled: c++ and ninja")
@pytest.mark.parametrize("paths", SUITES, ids=" ".join)
def test_passes_on_a_device(paths: list[str]) -> None:
    """In a session of its own: torch has one accelerator in a process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    of_parts = {} if paths in SUITES[:2] else {"TESTS_GROUPS": "cpu"}
    environment = {**os.environ, "TESTS_DEVICE": "stand_in", **of_parts}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:]
