"""The parser of commands with options alone, which imports nothing that takes time."""

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require
from lightning_shard.text import did_you_mean

KEYS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only")
"""At the top of a configuration of ``lightning-shard fit``."""

require(argparse.ArgumentParser, "_actions")


class UsageError(Exception):
    """Arguments or a configuration file that can't be parsed; the message is complete."""


_KINDS = {"int": "a whole number", "float": "a number", "count": "a whole number, 1 or more"}


def count(text: str) -> int:
    """The type of an option that is 1 or more."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


class OptionsParser(argparse.ArgumentParser):
    """Argparse's, which raises a UsageError with what was given, the rule and the right form."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            below = [action.choices for action in actions(self) if action.dest == "command" and action.required]
            parser = below[0][options.command] if below else self
            raise UsageError(parser.unknown(rest[0]))
        return options

    def unknown(self, word: str, more: Sequence[str] = ()) -> str:
        """What is wrong with a word that is neither an option nor one of ``more``, nor the value of one."""
        name = word.partition("=")[0]
        known = [option for action in actions(self) for option in action.option_strings] + [*more]
        named = [action.dest for action in actions(self) if not action.option_strings]
        if name.lstrip("-") in (*named, *(dest.rstrip("s") for dest in named)) and name.startswith("-"):
            return f"{name} is given without its name: {self.form}"
        if not word.startswith("-"):
            return f"{word!r} is one word too many: {self.form}"
        near = did_you_mean(name, known) or f" They are {', '.join(known)}."
        return f"{name} is no option of {self.prog.removeprefix('lightning-shard ')}.{near}"

    @property
    def form(self) -> str:
        """How the command is called."""
        named = [action for action in actions(self) if not action.option_strings]
        words = ["|".join(action.choices or ()) or action.metavar or action.dest.upper() for action in named]
        return " ".join([self.prog, *words, "[options]"])

    def error(self, message: str) -> NoReturn:
        name, _, said = message.removeprefix("argument ").partition(": ")
        if wrong := re.match(r"invalid (\w+) value: '(.*)'", said):
            message = f"{name}: got {wrong[2]}; allowed: {_KINDS[wrong[1]]}"
        elif wrong := re.match(r"invalid choice: '(.*?)' \(choose from (.*)\)", said):
            choices = wrong[2].replace("'", "")
            message = f"{name}: got {wrong[1]}; allowed: {choices}.{did_you_mean(wrong[1], choices.split(', '))}"
        elif said.startswith("expected"):
            message = f"{name}: needs a value; one that begins with a dash is given as {name}=VALUE"
        elif name == "the following arguments are required":
            message = f"{said}: required, and not given: {self.form}"
        raise UsageError(message.removeprefix("argument "))


def options_parser(name: str, description: str) -> OptionsParser:
    """A parser for a command whose arguments are no part of a run's configuration."""
    lines, prog = argparse.RawDescriptionHelpFormatter, f"lightning-shard {name}"
    return OptionsParser(prog=prog, description=description, formatter_class=lines, allow_abbrev=False)


def add_output(parser: argparse.ArgumentParser, text: str, default: Path | None = None) -> None:
    """``--output``, which `refuse_to_replace` checks, and ``--force``."""
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace the file that is at --output")


def refuse_to_replace(output: Path | None, force: bool) -> None:
    """Refuse an ``--output`` that exists, unless ``--force`` was given, that has no folder, or is no file."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigurationError(f"{output} is a folder: give the path of a file.")
    if os.path.lexists(output) and not force:
        raise ConfigurationError(f"{output} exists: choose another path, remove it, or give --force.")
    if output.exists() and not output.is_file():
        raise ConfigurationError(f"{output} is a device or a pipe: give the path of a file.")
    if not output.parent.is_dir():
        raise ConfigurationError(f"{output}: there is no folder {output.parent}. Make it first.")


def write_output(output: Path, text: str, force: bool) -> None:
    """Write the file at ``--output``, completely or not at all, as `refuse_to_replace` allows; through a link."""
    refuse_to_replace(output, force)
    target = output.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(temporary.unlink, missing_ok=True)
            temporary.write_bytes(as_bytes(text))
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
    except OSError as error:
        raise ConfigurationError(f"{output} can't be written: {error.strerror}.") from error


def as_bytes(text: str) -> bytes:
    """UTF-8; words of the command line that are none become the bytes that they were."""
    return text.encode("utf-8", "surrogateescape")


def actions(parser: Any) -> list[Any]:
    """The arguments of a parser, argparse's or jsonargparse's."""
    return list(parser._actions)
