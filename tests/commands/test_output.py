"""The file at ``--output``."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shard import ConfigurationError
from lightning_shard.commands import slurm
from tests.harness import ROOT


def test_a_script_is_replaced_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "run.sh"
    output.write_text("mine")
    with pytest.raises(ConfigurationError, match="give --force"):
        slurm.main(["--model=M", "--output", str(output)])
    assert output.read_text() == "mine"
    assert slurm.main(["--model=M", "--output", str(output), "--force"]) == 0
    assert output.read_text().startswith("#!/bin/bash")


def test_a_script_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = [sys.executable, "-m", "lightning_shard", "slurm", "--output=run.sh"]
    # A name that is no UTF-8, and one that the locale has not.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name in (b"M\xff", "Mü".encode()):
        subprocess.run([*program, "--force", b"--model=" + name], env=environ, check=True)
        assert name in Path("run.sh").read_bytes()
    Path("run.sh").chmod(0o755)
    Path("link.sh").symlink_to("run.sh")
    Path("later.sh").symlink_to("nothing.sh")
    os.mkfifo("pipe")
    for taken in ("link.sh", "later.sh", "pipe"):
        with pytest.raises(ConfigurationError, match="give --force"):
            slurm.main(["--model=M", "--output", taken])
    with pytest.raises(ConfigurationError, match="pipe is a device or a pipe"):
        slurm.main(["--model=M", "--output=pipe", "--force"])
    assert slurm.main(["--model=New", "--output=link.sh", "--force"]) == 0
    assert b"New" in Path("run.sh").read_bytes()
    assert Path("link.sh").is_symlink()
    assert os.access("run.sh", os.X_OK)
    monkeypatch.setattr(os, "replace", _no_space)
    with pytest.raises(ConfigurationError, match=r"run\.sh can't be written: No space left on device"):
        slurm.main(["--model=Other", "--output=run.sh", "--force"])
    assert b"New" in Path("run.sh").read_bytes()
    assert sorted(os.listdir()) == ["later.sh", "link.sh", "pipe", "run.sh", "slurm-logs"]


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
