"""The parser of commands with options alone, which imports nothing that takes time."""

import argparse
from pathlib import Path
from typing import Any

from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require

KEYS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only")
"""At the top of a configuration of ``lightning-shard fit``."""

require(argparse.ArgumentParser, "_actions", tested="Python 3.10 to 3.13")


def options_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser for a command whose arguments are no part of a run's configuration."""
    return argparse.ArgumentParser(
        prog=f"lightning-shard {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_output(parser: argparse.ArgumentParser, text: str, default: Path | None = None) -> None:
    """``--output``, which `refuse_to_replace` checks, and ``--force``."""
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace the file that is at --output")


def refuse_to_replace(output: Path | None, force: bool) -> None:
    """Refuse an ``--output`` that exists, unless ``--force`` was given, or that has no folder."""
    if output is not None and output.exists() and not force:
        raise ConfigurationError(f"{output} exists: choose another path, remove it, or give --force.")
    if output is not None and not output.parent.is_dir():
        raise ConfigurationError(f"{output}: there is no folder {output.parent}. Make it first.")


def actions(parser: Any) -> list[Any]:
    """The arguments of a parser, argparse's or jsonargparse's."""
    return list(parser._actions)


class UsageError(Exception):
    """Arguments or a configuration file that can't be parsed; the message is complete."""
