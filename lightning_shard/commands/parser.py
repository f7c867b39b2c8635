"""The parsers of the command line: Lightning's with readable messages, and one for commands with options alone."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lightning_shard.commands.messages import UsageError, explain


class ShardArgumentParser(LightningArgumentParser):
    """Lightning's parser, which raises :class:`~lightning_shard.commands.messages.UsageError`."""

    failure: Exception | None = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the explained message; parsers inside a type check (``exit_on_error=False``) stay as they are."""
        if not self.exit_on_error:
            super().error(message, ex)
        # jsonargparse reports from the parser above the subcommand's, which has the keys.
        parser = getattr(ex, "subcommand_parser", None) or self
        raise UsageError(explain(message, _keys(parser))) from ex

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """As jsonargparse's, and keep what a constructor raised in ``self.failure``.

        jsonargparse tries every type of a union and reports a failed constructor as one more type that did not fit.
        """

        @functools.wraps(instantiator)
        def keep_failure(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                self.failure = error
                raise

        super().add_instantiator(keep_failure, *args, **kwargs)

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the action, to add this package's commands after Lightning's."""
        self.subcommands = super().add_subcommands(*args, **kwargs)
        return self.subcommands

    def list_commands(self, commands: Mapping[str, str]) -> None:
        """Show commands that this parser does not parse, with their one line each, in the help."""
        for name, text in commands.items():
            self.subcommands.add_subcommand(name, type(self)(description=text), help=text)


def _keys(parser: Any) -> list[str]:
    return [action.dest for action in parser._actions if action.dest != "help"]


def options_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser for a command whose arguments are no part of a run's configuration."""
    return argparse.ArgumentParser(
        prog=f"lightning-shard {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
