"""The command line, ``lightning-shard fit|validate|test|predict|strategies|checkpoint|slurm|...``, and `ShardCLI`.

A user's mistake ends in one message on stderr and exit code 2; a bug in the user's code keeps its traceback.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning
import torch
import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard import (
    __version__,
    checkpoint_commands,
    doctor,
    migrate_command,
    mistakes,
    planner,
    registry,
    submit,
)
from lightning_shard.errors import ConfigurationError
from lightning_shard.explain import explain

MISTAKE_EXIT_CODE = 2
_COMMANDS: Mapping[str, Any] = {"slurm": submit, "doctor": doctor, "migrate": migrate_command, "plan": planner}
# How long a rank other than 0 keeps a mistake to itself: rank 0 has most often made the same one, says it, and
# ends the others.
_SILENCE_SECONDS = 2.0
# How long rank 0 waits for the children's own last words before it ends them.
_LAST_WORDS_SECONDS = 4.0
# As Lightning reads them.
_FP16_FLAGS = ("16", "16-mixed")
_CHECKPOINT_WORDS = ("auto", "best", "last", "hpc", "registry")


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
        for name, module in _COMMANDS.items():
            self.subcommands.add_subcommand(name, type(self)(description=module.SUMMARY), help=module.SUMMARY)

    def add_checkpoint_subcommand(self) -> None:
        """Add ``checkpoint inspect|verify|convert|export``."""
        text = "Look into a checkpoint, check it, convert it, or export its weights."
        parser = type(self)(description=text)
        self.subcommands.add_subcommand("checkpoint", parser, help=text)
        checkpoint_commands.add_to(parser)  # in this order, which jsonargparse wants


class ShardCLI(LightningCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` with this package's strategies, messages and ``strategies``.

    Takes what LightningCLI takes. Without ``model_class`` and ``datamodule_class`` any LightningModule and
    LightningDataModule can be named by ``class_path``; modules are also found in the current folder::

        from lightning_shard import ShardCLI

        ShardCLI(MyModule, MyDataModule)

    Args:
        model_class: the LightningModule, or a function that returns one; default: named in the configuration.
        datamodule_class: the same of the LightningDataModule.
        args: what to parse in place of ``sys.argv[1:]``: a list of arguments or a configuration as a mapping.
        environ: the launcher's environment, which says which rank this is; by default this process's.
        **kwargs: LightningCLI's other arguments.

    Raises:
        SystemExit: code 2 on every rank after a user's mistake; its ``__cause__`` is the error.
    """

    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        *,
        args: ArgsType = None,
        environ: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        arguments = sys.argv[1:] if args is None else args
        self._arguments = list(arguments) if isinstance(arguments, list) else None
        _find_modules_in_current_folder(sys.path)
        kwargs.setdefault("parser_class", ShardArgumentParser)
        kwargs["parser_kwargs"] = {"version": _versions(), **(kwargs.get("parser_kwargs") or {})}
        try:
            super().__init__(model_class, datamodule_class, args=args, **kwargs)
        except Exception as error:
            cause = mistakes.cause_of(error, getattr(getattr(self, "parser", None), "failure", None))
            self._end(cause)
            if cause is error:
                raise
            raise cause from None

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Lightning's parser with ``--traceback``, whose help has the texts below the fields of dataclasses."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        parser = super().init_parser(**kwargs)
        parser.add_argument("--traceback", action="store_true", help="Show the stack of frames of a mistake too.")
        return parser

    def setup_parser(self, add_subcommands: bool, *args: Any, **kwargs: Any) -> None:
        """Lightning's parsers, ``strategies`` and ``checkpoint``."""
        super().setup_parser(add_subcommands, *args, **kwargs)
        if add_subcommands and isinstance(self.parser, ShardArgumentParser):
            self.parser.add_own_subcommands()
            self.parser.add_checkpoint_subcommand()

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse into ``self.config``; ``strategies`` and ``checkpoint`` print and end here."""
        super().parse_arguments(parser, args)
        for config in (self.config, self.config.get(str(self.config.get("subcommand")))):
            if config is not None:
                config.pop("traceback", None)  # not a part of the run that a saved config.yaml repeats
        if self.config.get("subcommand") == "strategies":
            name = self.config["strategies"]["name"]
            print(registry.table() if name is None else registry.preset_yaml(name) + registry.further_arguments(name))
            raise SystemExit(0)
        if self.config.get("subcommand") == "checkpoint":
            print(checkpoint_commands.run(self.config["checkpoint"]))
            raise SystemExit(0)
        config = self.config.get(str(self.config.get("subcommand")), self.config)
        _check_strategy(config.get("trainer.strategy"))
        _check_ckpt_path(config.get("ckpt_path"))

    def before_instantiate_classes(self) -> None:
        """Give ``16-mixed`` to a strategy of this package by the plugin: Lightning makes bf16 of the flag on CPU."""
        super().before_instantiate_classes()
        config = self.config.get(str(self.config.get("subcommand")), self.config)
        trainer = config.get("trainer")
        if trainer is None or str(trainer.get("precision")) not in _FP16_FLAGS or not _is_own(trainer.get("strategy")):
            return
        plugins = trainer.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        own = Namespace(class_path="lightning_shard.ShardPrecision", init_args=Namespace(precision="16-mixed"))
        trainer["plugins"] = [*plugins, own]
        trainer["precision"] = None

    def instantiate_classes(self) -> None:
        """Lightning's; what a constructor raises is kept by the parser, and a second run saves its configuration."""
        self.parser.add_instantiator(_construct, object)  # after, and so behind, those of the model and the data
        if not self.save_config_kwargs:
            # Lightning refuses to run twice in one folder, as happens to a run without a logger that makes a new one
            # each time: then a validation of what was just trained fails, or would replace its configuration.
            name = "config.yaml" if self.subcommand in (None, "fit") else f"config_{self.subcommand}.yaml"
            self.save_config_kwargs = {"overwrite": True, "config_filename": name}
        super().instantiate_classes()

    def after_fit(self) -> None:
        """Say where the checkpoint is and how to validate it; rank 0."""
        callback = self.trainer.checkpoint_callback
        if not self.trainer.is_global_zero or not isinstance(callback, ModelCheckpoint):
            return
        best, last = callback.best_model_path, callback.last_model_path
        if not (best or last):
            return
        score = callback.best_model_score if best else None
        scored = "" if score is None else f" (best {callback.monitor}: {float(score):.6g})"
        print(f"checkpoint: {_shortest(best or last)}{scored}")
        if best and last and best != last:
            print(f"last checkpoint: {_shortest(last)}")
        if self._arguments is not None and self.subcommand == "fit" and self.trainer.enable_validation:
            arguments = _validate_arguments(self._arguments, _shortest(best or last))
            print(f"validate it with: {_program(self.parser.prog)} {shlex.join(arguments)}")

    def _end(self, error: Exception) -> None:
        """End the children; after a mistake say it on one rank and exit. Returns when the error is to be raised."""
        children = mistakes.take_children(getattr(self, "trainer", None))
        if not mistakes.is_mistake(error):
            # A lost child breaks this rank's collectives: then what the child said is the cause.
            if MISTAKE_EXIT_CODE in mistakes.wait(children, _LAST_WORDS_SECONDS):
                raise SystemExit(MISTAKE_EXIT_CODE) from error
            mistakes.terminate(children)
            return
        rank = mistakes.global_rank(self._environ)
        if rank != 0:
            time.sleep(_SILENCE_SECONDS)
        sys.stdout.flush()
        where = mistakes.user_frame(error)
        raised = f"\n(raised in {where})" if where else ""
        file = _broken_config(self._arguments or []) if isinstance(error, mistakes.UsageError) else ""
        prefix = f"{'' if rank == 0 else f'[rank {rank}] '}error: {file}"
        print(f"{prefix}{error}{raised}", file=sys.stderr, flush=True)
        mistakes.terminate(children)
        if self._arguments is not None and "--traceback" in self._arguments:
            traceback.print_exception(error)
        raise SystemExit(MISTAKE_EXIT_CODE) from error


def main() -> None:
    """Entry point of ``lightning-shard``."""
    # Lightning 2.6 says this of itself on every rank with torch 2.13.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    if sys.argv[1:2] and sys.argv[1] in _COMMANDS:
        raise SystemExit(_run_command(sys.argv[1], sys.argv[2:]))
    ShardCLI(parser_kwargs={"prog": _own_program(sys.argv[0]), "description": "Train with sharded strategies."})


def _run_command(name: str, arguments: Sequence[str]) -> int:
    try:
        return int(_COMMANDS[name].main(arguments))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE_EXIT_CODE


def _construct(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def _own_program(script: str) -> str:
    return "python -m lightning_shard" if Path(script).name == "__main__.py" else Path(script).name


def _program(prog: str) -> str:
    return f"python {prog}" if prog.endswith(".py") else prog


def _versions() -> str:
    return f"{__version__} (lightning {lightning.__version__}, torch {torch.__version__})"


def _find_modules_in_current_folder(path: MutableSequence[str]) -> None:
    """As ``python -m`` does; a console script's own folder stands first instead."""
    if "" not in path and os.getcwd() not in path:
        path.insert(0, os.getcwd())


def _keys(parser: Any) -> list[str]:
    return [action.dest for action in parser._actions if action.dest != "help"]


def _check_strategy(strategy: Any) -> None:
    if isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry):
        raise mistakes.UsageError(f"trainer.strategy: {registry.unknown_name(strategy)}")


def _is_own(strategy: Any) -> bool:
    """Whether ``trainer.strategy``, as it was parsed, is a strategy of this package, by its name or its class."""
    if isinstance(strategy, str):
        return strategy.lower() in registry.PRESETS
    class_path = getattr(strategy, "class_path", None)
    if class_path is None:
        return False
    from lightning_shard.strategies.base import ShardStrategy

    module, _, name = class_path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return isinstance(found, type) and issubclass(found, ShardStrategy)


def _check_ckpt_path(path: Any) -> None:
    """Of a local path; words that Lightning resolves and remote paths are left to it."""
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _CHECKPOINT_WORDS:
        return
    if not Path(path).exists():
        raise mistakes.UsageError(
            f"ckpt_path: {str(path)!r} does not exist. Allowed: the path of a checkpoint, or one of auto, best, last."
        )
    if Path(path).is_file():
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK" and not start.startswith(b"\x80"):  # torch's zip files, and pickles of before torch 1.6
            raise mistakes.UsageError(
                f"ckpt_path: {str(path)!r} is not a checkpoint. Allowed: a checkpoint directory or a .ckpt file."
            )


def _broken_config(arguments: Sequence[str]) -> str:
    """``"PATH: "`` of the first ``--config`` file that is no YAML mapping, or ``""``: the parser doesn't say which."""
    for option, value in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, inline = option.partition("=")
        path = Path(inline if equals else value)
        if name not in ("-c", "--config") or not path.is_file():
            continue
        try:
            if not isinstance(yaml.safe_load(path.read_text()), dict | None):
                return f"{path}: "
        except (yaml.YAMLError, UnicodeDecodeError):
            return f"{path}: "
    return ""


def _shortest(path: str) -> str:
    """Relative to the current folder where it lies in it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _validate_arguments(fit: Sequence[str], ckpt_path: str) -> list[str]:
    """The arguments of ``fit`` with ``validate`` and the checkpoint in place of its own."""
    arguments: list[str] = []
    words = iter(fit)
    for word in words:
        if word == "--ckpt_path":
            next(words, None)
        elif not word.startswith("--ckpt_path="):
            arguments.append(word)
    arguments[arguments.index("fit")] = "validate"
    return [*arguments, "--ckpt_path", ckpt_path]
