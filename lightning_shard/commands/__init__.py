"""The commands of ``lightning-shard``: one table. A command's module is imported when the command runs.

:class:`~lightning_shard.commands.cli.ShardCLI` is ``fit``, ``validate``, ``test`` and ``predict``, and runs the
commands of the table too. Each of these is a module with ``main(arguments)``, which prints and returns the exit code.
``ShardCLI`` reports its errors. `run_quick` runs the commands that need neither torch nor Lightning.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence

from lightning_shard.commands.options import UsageError
from lightning_shard.errors import ConfigurationError
from lightning_shard.text import did_you_mean

COMMANDS: Mapping[str, str] = {
    "init": "Ask five things and write one complete configuration with comments.",
    "strategies": "Print the strategy names, or the YAML that equals one of them.",
    "slurm": "Write a SLURM batch script of a run, or submit it.",
    "doctor": "Check the processes of a job: versions, devices, collectives, links between them.",
    "selftest": "Say whether this machine's engines agree bit by bit, save, resume and switch.",
    "env": "Print the facts for a bug report: versions, devices, variables, kernels.",
    "migrate": "Write the YAML for this package from an Accelerate, DeepSpeed or Lightning configuration.",
    "plan": "Predict a run: memory per device, largest batch, traffic, step time.",
    "checkpoint": "Look into a checkpoint, check it, convert it, or export its weights.",
    "completion": "Print a script for the shell that completes commands and options.",
}
"""This package's commands in the order of the help, with one line of help each."""

FIT: Mapping[str, str] = {
    "fit": "Train. It has the options of LightningCLI: --config, --trainer.*, --model.*, --data.*.",
    "validate": "Validate a checkpoint.",
    "test": "Test a checkpoint.",
    "predict": "Predict with a checkpoint.",
}
"""LightningCLI's subcommands, likewise."""

EXAMPLES: Mapping[str, str] = {
    "fit": "--config run.yaml --trainer.strategy shard_fsdp_aligned",
    **dict.fromkeys(("validate", "test", "predict"), "--config run.yaml --ckpt_path last.ckpt"),
    "strategies": "shard_fsdp_hybrid",
    "slurm": "--nodes 2 --devices 8 --config run.yaml --submit",
    "migrate": "accelerate.yaml --to shard_fsdp --output run.yaml",
    "plan": "--devices 8 --device-memory 80GB --compare --config run.yaml",
    "checkpoint": "inspect last.ckpt",
    "completion": "bash >> ~/.bashrc",
}
"""Arguments of the example in the help, if there are any."""

_FIT_ELSEWHERE = ("train", "launch", "run", "start")  # names of the command in other programs
_QUICK = ("strategies", "slurm", "env", "selftest", "init")


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Return the command's exit code. UsageError: a file in the arguments can't be read or written."""
    try:
        return int(importlib.import_module(f"lightning_shard.commands.{name}").main(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # the shells' code for Ctrl-C
    except OSError as error:
        if error.filename is None or isinstance(error, ConnectionError):
            raise
        raise UsageError(f"{error.filename}: {error.strerror}.") from error


def run_quick(program: str, arguments: Sequence[str]) -> int | None:
    """Answer without torch: help, version, an unknown command, `_QUICK`. Return the exit code, None for others."""
    first = arguments[0] if arguments else "--help"
    try:
        if first in ("-h", "--help"):
            print(overview(program))
        elif first == "--version":
            print(f"{program} {versions()}")
        elif first in _QUICK:
            return run_command(first, arguments[1:])
        elif first.startswith("-") or first in (*FIT, *COMMANDS):
            return None
        else:
            known = [*FIT, *COMMANDS]
            near = " Did you mean fit?" if first in _FIT_ELSEWHERE else did_you_mean(first, known)
            raise UsageError(f"there is no command {first!r}.{near}\nCommands: {', '.join(known)}.")
    except (UsageError, ConfigurationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def option_values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options with their values, which follow a "=" or are the next word."""
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, inline = word.partition("=")
        yield name, inline if equals else following


def config_files(arguments: Sequence[str]) -> list[str]:
    return [value for name, value in option_values(arguments) if name in ("-c", "--config")]


def overview(program: str) -> str:
    lines = [f"usage: {program} COMMAND [options]", "", "Train with sharded strategies.", ""]
    for name, text in {**FIT, **COMMANDS}.items():
        lines += [f"  {name:<11} {text}", f"  {'':<11} $ {program} {name} {EXAMPLES.get(name, '')}".rstrip()]
    lines += ["", f"{program} COMMAND --help lists the options of a command. --traceback before or after it shows"]
    return "\n".join([*lines, "the frames of a mistake too. --version prints the versions."])


def versions() -> str:
    """Return the versions of this package, Lightning and torch, without importing the last two."""
    from importlib.metadata import version

    from lightning_shard import __version__

    return f"{__version__} (lightning {version('lightning')}, torch {version('torch')})"
