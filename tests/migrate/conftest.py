"""Migrated configurations, tables and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_shard import ConfigurationError
from lightning_shard.commands import migrate as migrate_command
from tests.migrate.support import with_notes


@pytest.fixture
def migrated(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Migrate files, or contents in their place, and return the YAML's content."""

    def run(*words: object) -> dict[str, Any]:
        output = tmp_path / f"out{len(list(tmp_path.iterdir()))}.yaml"
        assert migrate_command.main([*_files(tmp_path, words), "--output", str(output)]) == 0
        return yaml.safe_load(output.read_text())

    return run


@pytest.fixture
def table(migrated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Migrate, and return the table with its notes."""

    def run(*words: object) -> str:
        capsys.readouterr()
        migrated(*words)
        return with_notes(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Migrate what is refused, and return the message."""

    def run(*words: object) -> str:
        with pytest.raises(ConfigurationError) as raised:
            migrate_command.main(_files(tmp_path, words))
        return str(raised.value)

    return run


def _files(folder: Path, words: tuple[object, ...]) -> list[str]:
    """Mappings as files: DeepSpeed's as JSON, others as YAML."""
    given = []
    for number, word in enumerate(words):
        if isinstance(word, dict):
            deepspeed = "zero_optimization" in word
            path = folder / f"in{number}.{'json' if deepspeed else 'yaml'}"
            path.write_text(json.dumps(word) if deepspeed else yaml.safe_dump(word))
            word = path
        given.append(str(word))
    return given
