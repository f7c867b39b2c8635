"""The tested versions: one table that pyproject.toml and the README agree with, and what is newer than it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lightning_shard import versions
from lightning_shard.engines.zero import connection
from lightning_shard.versions import TESTED, installed_version, newer_than_tested, version_numbers

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("library", TESTED)
def test_pyproject_requires_the_lowest_and_caps_none(library: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    form = r'^requires-python = "(.*)"$' if library == "python" else rf'^    "{library}([<>=!~].*?)(?:;.*)?",$'
    assert re.findall(form, project, re.MULTILINE) == [f">={TESTED[library][0]}"]


def test_the_lowest_versions_as_constraints() -> None:
    printed = subprocess.run([sys.executable, ".ci/lowest.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line.partition("==")[0] for line in printed.stdout.splitlines()]
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert names == [re.split(r"[\[>]", requirement)[0] for requirement in required]
    assert {f"{name}=={TESTED[name][0]}" for name in ("torch", "lightning")} <= set(printed.stdout.split())


@pytest.mark.parametrize("name", ["Python", "torch", "Lightning", "DeepSpeed"])
def test_the_readme_says_the_same(name: str) -> None:
    lowest, newest = TESTED[name.lower()]
    row = rf"^\| {name} \| {re.escape(lowest)} or newer, tested to {re.escape(newest)}[ ,]"
    assert len(re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)) == 1


@pytest.mark.parametrize("library", TESTED)
def test_what_is_installed_lies_in_the_range(library: str) -> None:
    lowest, newest = TESTED[library]
    found = installed_version(library)
    assert found is not None
    assert version_numbers(lowest) <= version_numbers(found)
    assert version_numbers(found)[:2] <= version_numbers(newest)[:2]


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        ("2.15.0", False),
        ("2.15.7+cpu", False),  # a patch
        ("2.16.0.dev20260801+cpu", True),
        ("2.100", True),
        (None, False),
    ],
)
def test_what_is_newer(version: str | None, is_newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "torch", ("2.13.0", "2.15.0"))
    monkeypatch.setattr(
        versions, "installed_version", lambda library: version if library == "torch" else TESTED[library][1]
    )
    assert newer_than_tested() == ({"torch": version} if is_newer else {})


def test_an_older_deepspeed_is_refused_and_a_newer_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    for version in ("0.19.8", "0.19.9+git", "0.20.0", "1.0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        connection.refuse_older_version()
    monkeypatch.setattr(deepspeed, "__version__", "0.19.7")
    with pytest.raises(ImportError, match=r"DeepSpeed 0\.19\.7 is .* needs 0\.19\.8 or newer: pip install"):
        connection.refuse_older_version()
