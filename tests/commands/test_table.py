"""The table of commands: what it names runs, from the program and from a script, and only then is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import lightning
import pytest

from lightning_shard import __version__
from lightning_shard.commands import COMMANDS, EXAMPLES, FIT, run_command, run_quick
from lightning_shard.commands.options import UsageError

PROGRAM = "import sys; sys.argv[0] = '/bin/lightning-shard'; from lightning_shard.__main__ import main; main()"


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


QUICK: dict[str, tuple[int, str]] = {
    "": (0, "checkpoint inspect last.ckpt"),
    "--version": (0, f" {__version__} (lightning {lightning.__version__}, torch {version('torch')})"),
    "fot": (2, "error: there is no command 'fot'. Did you mean fit?"),
    "strategies shard_fdsp": (2, "error: there is no strategy 'shard_fdsp'. Did you mean shard_fsdp"),
    "slurm --nodes 2 --model M": (0, "#SBATCH --nodes=2"),
    "selftest --help": (0, "usage: lightning-shard selftest"),
    "slurm --confg run.yaml": (2, "error: --confg is no option of slurm, nor of fit. Did you mean --config"),
}


WRONG = {
    "checkpoint inspect": "the following arguments are required: path",
    "checkpoint inspect a b": "'b' is one word too many for lightning-shard checkpoint inspect",
    "checkpoint convert x y --wieghts_only": "--wieghts_only is no option of checkpoint convert. Did you mean --w",
    "checkpoint": "the following arguments are required: COMMAND",
    "completion fish": "shell: invalid choice: 'fish' (choose from ",
    "plan --device-memory 80GB --nodes 0": "--nodes: got 0, but must be a whole number, 1 or more",
    "plan --device-memory 80": "--device-memory: '80' is no size. Write a number and a unit",
    "doctor --seconds soon": "--seconds: invalid float value: 'soon'",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_told_the_right_form(line: str) -> None:
    name, *arguments = line.split()
    with pytest.raises(UsageError) as raised:
        run_command(name, arguments)
    assert WRONG[line] in str(raised.value)
    assert "usage:" not in str(raised.value)


@pytest.mark.parametrize("line", QUICK)
def test_what_needs_no_torch_is_answered_without_it(line: str) -> None:
    code, text = QUICK[line]
    watch = """
import atexit, sys, time
atexit.register(lambda: print(f"\\nmodules {time.process_time()}", *sys.modules))
"""
    ended = _run(watch + PROGRAM, *line.split())
    said, _, after = ended.stdout.rpartition("\nmodules ")
    assert ended.returncode == code, ended.stderr
    assert text in said + ended.stderr
    assert "Traceback" not in ended.stderr
    seconds, *modules = after.split()
    assert float(seconds) < 0.5
    assert set(modules) & {"torch", "lightning", "jsonargparse", "deepspeed", "numpy"} == set()


def test_the_program_alone_shows_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_quick("lightning-shard", []) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, summary in {**FIT, **COMMANDS}.items():
        place = lines.index(f"  {name:<11} {summary}")
        assert lines[place + 1].startswith(f"{' ' * 14}$ lightning-shard {name}")


def test_the_shell_completes_commands_options_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("completion", ["bash"]) == 0
    words = 't() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _lightning_shard; echo ${COMPREPLY[@]}; }\n'
    lines = {
        "ch": "checkpoint",
        "fit --trainer.max_t": "--trainer.max_time",
        "fit --trainer.strategy shard_ddp": "shard_ddp shard_ddp_aligned",
        "slurm --sub": "--submit",
        "checkpoint ve": "verify",
        "fit --config x": "",
    }
    script = capsys.readouterr().out + words + "".join(f"t lightning-shard {line}\n" for line in lines)
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == list(lines.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(name, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.match(rf"usage: lightning-shard .*\b{name}\s", text)
    words = [] if name == "checkpoint" else EXAMPLES.get(name, "").split()
    own = [word for word in words if word.startswith("--") and word != "--config"]
    assert [word for word in own if word not in text] == []


@pytest.mark.matrix
def test_a_command_that_is_not_first(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    ended = _run(PROGRAM, "--config", str(tmp_path / "empty.yaml"), "strategies")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, "error: strategies: must be the first argument.")
