"""Fixtures of the folders whose commands are tested here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_shard import ShardCLI
from tests.checkpoint.conftest import trained
from tests.commands.support import BASE

__all__ = ["trained"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ShardCLI]:
    """Run arguments as a shell would, in an empty folder that has ``base.yaml``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))

    def run(*arguments: str, **kwargs: object) -> ShardCLI:
        monkeypatch.setattr(sys, "argv", ["lightning-shard", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        return ShardCLI(environ={}, **kwargs)

    return run
