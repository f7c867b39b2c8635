"""Lightning's parser, which suggests the keys nearest to an unknown one."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_shard.arguments import imported
from lightning_shard.commands.options import UsageError, actions
from lightning_shard.text import did_you_mean


class ShardArgumentParser(LightningArgumentParser):
    """Lightning's parser, which raises :class:`~lightning_shard.commands.options.UsageError` in place of exiting."""

    failure: Exception | None = None
    subcommands: Any = None
    instantiators: Sequence[tuple[Callable[..., Any], type, bool]] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message`` as a UsageError. Parsers inside a type check have ``exit_on_error=False`` and stay."""
        if not self.exit_on_error:
            super().error(message, ex)
        # jsonargparse reports from the outer parser, but the subcommand's parser has the keys.
        parser = getattr(ex, "subcommand_parser", None) or self
        keys = [action.dest for action in actions(parser) if action.dest != "help"]
        raise UsageError(with_near_keys(message, keys)) from ex

    def build(self, config: Namespace) -> Namespace:
        """Build the objects of ``config``. Keep a constructor's exception in ``self.failure``, since jsonargparse
        replaces it by one of its own.
        """
        chosen = self.subcommands.choices.get(config.get("subcommand")) if self.subcommands else None
        given = [*(chosen.instantiators if chosen else []), *self.instantiators, (_construct, object, True)]
        return self.instantiate(config, instantiators=[(self.wrap_instantiator(one), *kinds) for one, *kinds in given])

    def wrap_instantiator(self, instantiator: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``instantiator`` for `build`, with its signature, which jsonargparse reads."""

        @functools.wraps(instantiator)
        def keep_failure(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                self.failure = error
                raise

        return keep_failure

    # LightningCLI calls its parser by these two names, which jsonargparse has deprecated and 5.0 removes.

    def add_instantiator(
        self, instantiator: Callable[..., Any], class_type: type, subclasses: bool = True, prepend: bool = False
    ) -> None:
        """Build classes of ``class_type`` by ``instantiator``. The first that fits is used."""
        added = (instantiator, class_type, subclasses)
        self.instantiators = [added, *self.instantiators] if prepend else [*self.instantiators, added]

    def instantiate_classes(self, cfg: Namespace) -> Namespace:
        return self.build(cfg)

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self.subcommands = super().add_subcommands(*args, **kwargs)
        return self.subcommands


def _construct(class_type: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


_UNRECOGNIZED = "unrecognized arguments: "
_NOT_ACCEPTED = re.compile(r"(?:does not accept option|Option) '([\w.]+)'")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")


def with_near_keys(message: str, keys: Collection[str]) -> str:
    """Add the nearest of the parser's ``keys``, or of a class's arguments, to an error about an unknown key."""
    if message.startswith(_UNRECOGNIZED):
        words = message.removeprefix(_UNRECOGNIZED).split()
        unknown = [word.partition("=")[0][2:] for word in words if word.startswith("--")]
        return "\n".join(f"{key}: there is no such key.{did_you_mean(key, keys)}" for key in unknown) or message
    unknown, owner = _NOT_ACCEPTED.findall(message), imported((_CLASS.findall(message) or [""])[-1])
    if not unknown:
        return message
    if inspect.isclass(owner):
        near = did_you_mean(unknown[-1], inspect.signature(owner).parameters)
        return message + f"\n{unknown[-1]}:{near}" * bool(near)
    return f"{unknown[-1]}: there is no such key.{did_you_mean(unknown[-1], keys)}"
