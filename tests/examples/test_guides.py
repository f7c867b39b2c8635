"""What README and guides show runs: Python blocks as scripts, commands in a folder that has the files they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_shard  # noqa: F401  (registers the strategy names)
from examples.guides import api
from lightning_shard import EMACallback
from tests.harness import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "examples" / "guides").glob("*.md"))]
NOT_RUN = {
    "pip install .": "it changes the environment",
    "pip install '.[examples]'": "the same; tests/examples/test_gpu_report.py runs the report",
    "from peft import": "of a run of the reader's; tests/checkpoint/foreign/test_hugging_face.py merges its adapters",
    "pip install -e '.[test]'": "the same",
    "lightning-shard fit --config run.yaml --trainer.accelerator gpu": "GPUs, several nodes and SLURM",
    "$ lightning-shard migrate ds_config.json": "of another file; tests/migrate/test_command.py has the message",
    "def ": "a method, of a module of the reader's",
    "from lightning_shard import full_tensor, set_full_tensor": "a callback of the reader's",
}
DEMO = "lightning.pytorch.demos.boring_classes"
RUN = {
    "model": f"{DEMO}.BoringModel",
    "data": f"{DEMO}.BoringDataModule",
    "trainer": {"strategy": "shard_fsdp", "devices": 2, "max_steps": 1},
}
FILES = {
    "run.yaml": yaml.safe_dump(RUN),
    "model.yaml": yaml.safe_dump({key: RUN[key] for key in ("model", "data")}),
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
    "fsdp_config: {fsdp_version: 2}\nnum_processes: 2\nnum_machines: 1\n",
    "training_args.json": '{"output_dir": "out", "bf16": true, "fsdp": "full_shard", "gradient_accumulation_steps": 2}',
    "ds_config.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
}


class Block(NamedTuple):
    page: Path
    language: str
    text: str


def _blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if language in languages:
                yield Block(page, language, text)


def _left_out(block: Block) -> bool:
    return any(block.text.startswith(beginning) for beginning in NOT_RUN)


PYTHON = list(_blocks("python"))
COMMANDS = [block for block in _blocks("sh", "bash", "console") if not _left_out(block)]


def _id(block: Block) -> str:
    return f"{block.page.stem}: {block.text.splitlines()[0][:50]}"


def test_every_block_that_is_left_out_is_there() -> None:
    texts = [block.text for block in _blocks("python", "sh", "bash", "console")]
    assert [beginning for beginning in NOT_RUN if not any(text.startswith(beginning) for text in texts)] == []


def test_blocks_compile_or_are_yaml() -> None:
    for block in PYTHON:
        compile(block.text, str(block.page), "exec")
    assert all(yaml.safe_load(block.text) for block in _blocks("yaml"))


def _environ() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A Trainer in this process leaves its rendezvous behind.
    own = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")}
    return {**own, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.matrix
@pytest.mark.parametrize("block", [block for block in PYTHON if not _left_out(block)], ids=_id)
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(block.text)
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, env=_environ())
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that pages name."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "folder").mkdir()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "callbacks": EMACallback()}
    trainer = Trainer(accelerator="cpu", devices=1, strategy="shard_ddp", max_steps=1, **quiet)
    trainer.fit(BoringModel(), BoringDataModule())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return tmp_path


@pytest.mark.matrix
@pytest.mark.parametrize("block", COMMANDS, ids=_id)
def test_commands_run_and_say_what_is_shown(block: Block, folder: Path) -> None:
    script, shown = block.text, ""
    if block.language == "console":
        script, shown = re.fullmatch(r"\$ (.*?[^\\])\n(.*)", block.text, re.DOTALL).groups()
    script = script.replace(" --module model", " --module layer").replace("--picture plan.png", "")
    if "# writes run.yaml" in script:
        (folder / "run.yaml").unlink()
    ended = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, env=_environ())
    assert ended.returncode == (2 if shown.startswith("error: ") else 0), ended.stderr
    assert shown.strip() in ended.stdout + ended.stderr


def test_the_page_of_the_api_is_that_of_the_docstrings() -> None:
    assert api.PAGE.read_text() == api.page(), "run `python -m examples.guides.api`"
