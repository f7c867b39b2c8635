"""The parser of commands with options alone, which imports nothing that takes time."""

import argparse
from typing import Any

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


def actions(parser: Any) -> list[Any]:
    """The arguments of a parser, argparse's or jsonargparse's."""
    return list(parser._actions)


class UsageError(Exception):
    """Arguments or a configuration file that can't be parsed; the message is complete."""
