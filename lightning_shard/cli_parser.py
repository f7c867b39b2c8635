"""The parser of the command line: its messages, and this package's own subcommands beside Lightning's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lightning_shard import checkpoint_commands, doctor, migrate_command, mistakes, planner, submit
from lightning_shard.explain import explain

COMMANDS: Mapping[str, Any] = {"slurm": submit, "doctor": doctor, "migrate": migrate_command, "plan": planner}
"""What runs without a configuration of a run: each has ``SUMMARY`` and ``main(arguments)``, the exit code."""


class ShardArgumentParser(LightningArgumentParser):
    """Lightning's parser, which raises :class:`~lightning_shard.mistakes.UsageError` with a readable message."""

    failure: Exception | None = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the explained message; parsers inside a type check (``exit_on_error=False``) stay as they are."""
        if not self.exit_on_error:
            super().error(message, ex)
        # jsonargparse reports from the parser above the subcommand's, which has the keys.
        parser = getattr(ex, "subcommand_parser", None) or self
        raise mistakes.UsageError(explain(message, _keys(parser))) from ex

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
        """Keep the action, to add this package's own subcommands after Lightning's."""
        self.subcommands = super().add_subcommands(*args, **kwargs)
        return self.subcommands

    def add_own_subcommands(self) -> None:
        """Add ``strategies [NAME]``, and for the help the commands that `main` runs without a configuration."""
        text = "Print the strategy names, or the YAML that equals one of them."
        parser = type(self)(description=text)
        parser.add_argument("name", nargs="?", type=str, help="a strategy name; without one: the table of names")
        self.subcommands.add_subcommand("strategies", parser, help=text)
        for name, module in COMMANDS.items():
            self.subcommands.add_subcommand(name, type(self)(description=module.SUMMARY), help=module.SUMMARY)

    def add_checkpoint_subcommand(self) -> None:
        """Add ``checkpoint inspect|verify|convert|export``."""
        text = "Look into a checkpoint, check it, convert it, or export its weights."
        parser = type(self)(description=text)
        self.subcommands.add_subcommand("checkpoint", parser, help=text)
        checkpoint_commands.add_to(parser)  # in this order, which jsonargparse wants


def _keys(parser: Any) -> list[str]:
    return [action.dest for action in parser._actions if action.dest != "help"]
