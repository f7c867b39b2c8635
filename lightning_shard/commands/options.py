"""The argparse parser of this package's commands, without slow imports."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require
from lightning_shard.text import did_you_mean

KEYS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only")
"""Top-level keys of a configuration of ``lightning-shard fit``."""

require(argparse.ArgumentParser, "_actions")


class UsageError(Exception):
    """Raised if arguments or a configuration file can't be parsed. The message is printed as it is."""


def count(text: str) -> int:
    """Parse the value of an option that must be 1 or more."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, but must be a whole number, 1 or more")
    return number


class OptionsParser(argparse.ArgumentParser):
    """Raise UsageError in place of exiting, and suggest the option nearest to an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            below = [action.choices for action in actions(self) if action.dest == "command" and action.required]
            parser = below[0][options.command] if below else self
            raise UsageError(parser.unknown(rest[0]))
        return options

    def unknown(self, word: str, more: Sequence[str] = ()) -> str:
        """Return the message for a word that is no option, nor in ``more``, nor the value of an option."""
        name = word.partition("=")[0]
        known = [option for action in actions(self) for option in action.option_strings] + [*more]
        if not word.startswith("-"):
            return f"{word!r} is one word too many for {self.prog}."
        near = did_you_mean(name, known) or f" They are {', '.join(known)}."
        return f"{name} is no option of {self.prog.removeprefix('lightning-shard ')}.{near}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def options_parser(name: str, description: str) -> OptionsParser:
    """Make the parser of a command."""
    lines, prog = argparse.RawDescriptionHelpFormatter, f"lightning-shard {name}"
    return OptionsParser(prog=prog, description=description, formatter_class=lines, allow_abbrev=False)


def add_output(parser: argparse.ArgumentParser, text: str, default: Path | None = None) -> None:
    """Add ``--output``, which `refuse_to_replace` checks, and ``--force``."""
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace the file that is at --output")


def refuse_to_replace(output: Path | None, force: bool) -> None:
    """Refuse an ``--output`` that exists without ``--force``, or whose folder is missing."""
    if output is None:
        return
    if os.path.lexists(output) and not force:
        raise ConfigurationError(f"{output} exists: choose another path, remove it, or give --force.")
    if not output.parent.is_dir():
        raise ConfigurationError(f"{output}: there is no folder {output.parent}. Make it first.")


def write_output(output: Path, text: str, force: bool) -> None:
    """Write ``text`` to ``--output`` after `refuse_to_replace`."""
    refuse_to_replace(output, force)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{output} can't be written: {error.strerror}.") from error


def actions(parser: Any) -> list[Any]:
    """Return the arguments of a parser of argparse or jsonargparse."""
    return list(parser._actions)
