"""The file at ``--output``, and what ``--verbose`` adds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_shard import ConfigurationError, ShardCLI
from lightning_shard.commands import slurm


def test_a_script_is_replaced_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "run.sh"
    output.write_text("mine")
    with pytest.raises(ConfigurationError, match="give --force"):
        slurm.main(["--model=M", "--output", str(output)])
    assert output.read_text() == "mine"
    assert slurm.main(["--model=M", "--output", str(output), "--force"]) == 0
    assert output.read_text().startswith("#!/bin/bash")


def test_what_can_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="there is no folder nowhere"):
        slurm.main(["--model=M", "--output=nowhere/run.sh"])
    with pytest.raises(ConfigurationError, match=r"can't be written: Is a directory"):
        slurm.main(["--model=M", "--force", "--output", str(tmp_path)])


def test_verbose_asks_for_the_table_of_dtypes(command: Callable[..., ShardCLI]) -> None:
    logger = logging.getLogger("lightning_shard")
    level = logger.level
    try:
        cli = command("fit", "--config", "base.yaml", "--verbose")
        assert logger.isEnabledFor(logging.DEBUG)
        assert "verbose" not in cli.config["fit"]
    finally:
        logger.setLevel(level)
