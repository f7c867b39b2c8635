"""The table of commands: what it names runs, from the program and from a script, and only then is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shard.commands import COMMANDS, run

SCRIPT = "from lightning_shard import ShardCLI; ShardCLI()"
PROGRAM = "from lightning_shard.__main__ import main; main()"


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_help_lists_all_commands_and_imports_none() -> None:
    watch = f"""
import atexit, sys
import lightning.pytorch  # torchmetrics imports transformers where it is installed
before = set(sys.modules)
atexit.register(lambda: print(*(set(sys.modules) - before)))
{PROGRAM}"""
    ended = _run(watch, "--help")
    assert ended.returncode == 0, ended.stderr
    text, _, modules = ended.stdout.rstrip().rpartition("\n")
    for name, summary in COMMANDS.items():
        assert f"    {name:<19} {summary}"[:60] in text
    imported = {module.removeprefix("lightning_shard.commands.") for module in modules.split()}
    assert "parser" in imported  # the listing is one
    assert imported & {*COMMANDS, "deepspeed", "transformers", "lightning_shard.strategies"} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_how_it_is_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, ["--help"])
    assert ended.value.code == 0
    assert re.match(rf"usage: lightning-shard .*\b{name}\s", capsys.readouterr().out)


@pytest.mark.parametrize("code", [PROGRAM, SCRIPT], ids=["program", "script"])
def test_a_command_of_the_table_runs(code: str, tmp_path: Path) -> None:
    ended = _run(code, "doctor", "--backend", "gloo", "--output", str(tmp_path / "links.json"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"links: {tmp_path / 'links.json'}"


def test_a_command_that_is_not_first(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    ended = _run(PROGRAM, "--config", str(tmp_path / "empty.yaml"), "strategies")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, "error: strategies: must be the first argument.")
