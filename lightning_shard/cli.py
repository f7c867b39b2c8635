"""The command line, ``lightning-shard fit|validate|test|predict|strategies|checkpoint|slurm|...``, and `ShardCLI`.

A user's mistake ends in one message on stderr and exit code 2; a bug in the user's code keeps its traceback.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_shard import __version__, checkpoint_commands, cli_arguments, mistakes, registry
from lightning_shard.cli_parser import COMMANDS, ShardArgumentParser
from lightning_shard.errors import ConfigurationError

MISTAKE_EXIT_CODE = 2
# How long a rank other than 0 keeps a mistake to itself: rank 0 has most often made the same one, says it, and
# ends the others.
_SILENCE_SECONDS = 2.0
# How long rank 0 waits for the children's own last words before it ends them.
_LAST_WORDS_SECONDS = 4.0


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
        cli_arguments.check_strategy(config.get("trainer.strategy"))
        cli_arguments.check_ckpt_path(config.get("ckpt_path"))

    def before_instantiate_classes(self) -> None:
        """Give ``16-mixed`` to a strategy of this package by the plugin: Lightning makes bf16 of the flag on CPU."""
        super().before_instantiate_classes()
        config = self.config.get(str(self.config.get("subcommand")), self.config)
        trainer = config.get("trainer")
        if trainer is None or str(trainer.get("precision")) not in cli_arguments.FP16_FLAGS:
            return
        if not cli_arguments.is_own(trainer.get("strategy")):
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
        print(f"checkpoint: {cli_arguments.shortest(best or last)}{scored}")
        if best and last and best != last:
            print(f"last checkpoint: {cli_arguments.shortest(last)}")
        if self._arguments is not None and self.subcommand == "fit" and self.trainer.enable_validation:
            arguments = cli_arguments.validate_arguments(self._arguments, cli_arguments.shortest(best or last))
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
        file = cli_arguments.broken_config(self._arguments or []) if isinstance(error, mistakes.UsageError) else ""
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
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        raise SystemExit(_run_command(sys.argv[1], sys.argv[2:]))
    ShardCLI(parser_kwargs={"prog": _own_program(sys.argv[0]), "description": "Train with sharded strategies."})


def _run_command(name: str, arguments: Sequence[str]) -> int:
    try:
        return int(COMMANDS[name].main(arguments))
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
