"""The package as it is shipped: wheel and sdist hold what they must, and the wheel runs outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_shard import __version__
from tests.harness import ROOT

pytest.importorskip("hatchling")
BUILD = "from hatchling import build as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
QUICKSTART = {f"lightning_shard/quickstart/{name}" for name in ("quickstart.yaml", "gpt.py", "python_corpus.py")}
FOLDERS = (".ci", ".github", "configs", "examples", "tests")  # what README.md and the guides name
FILES = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel and the sdist, built from a copy of what git knows."""
    source = tmp_path_factory.mktemp("source")
    for name in ("lightning_shard", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", *FILES):
        shutil.copy(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("dist")
    made = []
    for kind in ("build_wheel", "build_sdist"):
        command = [sys.executable, "-c", BUILD, kind, str(folder)]
        ended = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
        made.append(folder / ended.stdout.splitlines()[-1])
    return made


@pytest.mark.matrix
def test_wheel_and_sdist_hold_the_package_and_its_license(built: list[Path]) -> None:
    wheel = zipfile.ZipFile(built[0]).namelist()
    package = [
        path for path in (ROOT / "lightning_shard").rglob("*") if path.suffix in (".py", ".csv", ".yaml", ".typed")
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in package}
    assert {name for name in wheel if name.startswith("lightning_shard/")} == expected | QUICKSTART
    assert {name.partition("/")[0] for name in wheel} == {"lightning_shard", f"lightning_shard-{__version__}.dist-info"}
    assert f"lightning_shard-{__version__}.dist-info/licenses/LICENSE" in wheel
    with tarfile.open(built[1]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {*expected, "pyproject.toml", *FILES} <= sdist
    beside = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    kept = {path.relative_to(ROOT).as_posix() for path in beside if "__pycache__" not in path.parts}
    assert kept <= sdist


@pytest.mark.matrix
def test_the_wheel_runs_outside_of_the_checkout(built: list[Path], tmp_path: Path) -> None:
    zipfile.ZipFile(built[0]).extractall(tmp_path / "installed")
    shutil.copytree(ROOT / "examples" / "own_project", tmp_path / "project")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    changes = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]
    for words in (
        ["-c", f"import lightning_shard; assert lightning_shard.__file__.startswith({str(tmp_path)!r})"],
        ["-m", "lightning_shard", "--version"],
        ["-m", "lightning_shard", "init", "--example", "quickstart"],
        ["-m", "lightning_shard", "fit", "--config", "quickstart.yaml", "--trainer.max_steps=2", *changes[:1]],
        ["main.py", "fit", "--config", "run.yaml", *changes],
    ):
        ended = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "project", env=environ, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
    assert "checkpoint: runs/" in ended.stdout
