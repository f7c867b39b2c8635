"""`ShardCLI`: LightningCLI with this package's strategies, commands and messages."""

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_shard import commands
from lightning_shard._lightning.cli import ConfiguredCLI
from lightning_shard._lightning.messages import leave_out_noise
from lightning_shard.cluster.preemption import release_signals
from lightning_shard.commands import failures, fit
from lightning_shard.commands.options import UsageError
from lightning_shard.commands.parser import ShardArgumentParser


class ShardCLI(ConfiguredCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` with this package's strategies, commands and messages.

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
        SystemExit: code 2 on every rank after a user's mistake, with the error as its ``__cause__``; the exit code of
            a command that is not one of Lightning's.
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
        self._arguments = list(arguments) if isinstance(arguments, list) else []
        # As ``python -m`` does; a console script's own folder stands first instead.
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        leave_out_noise()
        kwargs.setdefault("parser_class", ShardArgumentParser)
        kwargs["parser_kwargs"] = {"version": commands.versions(), **(kwargs.get("parser_kwargs") or {})}
        # The others, of one command or for all at once, may speak of commands that are not run.
        self._builds_one = not kwargs["parser_kwargs"].keys() - {"version", "prog", "description"}
        try:
            words = self._arguments[1:] if self._arguments[:1] == ["--traceback"] else self._arguments
            if kwargs.get("run", True) and words and words[0] in commands.COMMANDS:
                raise SystemExit(commands.run(words[0], words[1:]))
            super().__init__(model_class, datamodule_class, args=args, **kwargs)
        except SystemExit as ended:
            # Lightning ends a run in which Ctrl-C was pressed by itself.
            if isinstance(ended.__context__, KeyboardInterrupt) and self.trainer.is_global_zero:
                print(f"interrupted at step {self.trainer.global_step}")
                if not self._print_checkpoints():
                    print("no checkpoint was saved")
            raise
        except Exception as error:
            cause = failures.cause_of(error, getattr(getattr(self, "parser", None), "failure", None))
            self._report(cause)
            if cause is error:
                raise
            raise cause from None

    def _report(self, error: Exception) -> None:
        """Print a user's mistake and end the process; returns where ``error`` is to be raised."""
        failures.end(error, getattr(self, "trainer", None), self._arguments, self._environ)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Lightning's parser with ``--traceback``, whose help has the texts below the fields of dataclasses."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        parser = super().init_parser(**kwargs)
        parser.add_argument("--traceback", action="store_true", help="Show the stack of frames of a mistake too.")
        return parser

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Lightning's, or the one alone that the first word names: each takes a tenth of a second to build."""
        every = super().subcommands()
        first = self._arguments[0] if self._arguments else ""
        return {first: every[first]} if first in every and self._builds_one else every

    def setup_parser(self, add_subcommands: bool, *args: Any, **kwargs: Any) -> None:
        """Lightning's parsers, and this package's commands in the help."""
        super().setup_parser(add_subcommands, *args, **kwargs)
        if add_subcommands and isinstance(self.parser, ShardArgumentParser):
            own = self.parser.subcommands.choices
            if "fit" in own:
                own["fit"].add_argument("--verbose", action="store_true", help="Show the table of measured dtypes too.")
            if len(own) > 1:
                self.parser.list_commands(commands.COMMANDS)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse into ``self.config``, and check what needs no Trainer."""
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        if name in commands.COMMANDS:
            raise UsageError(f"{name}: must be the first argument.")
        for config in (self.config, self._run_config):
            config.pop("traceback", None)  # not a part of the run that a saved config.yaml repeats
        if name == "fit" and self._run_config.pop("verbose"):
            logging.getLogger("lightning_shard").setLevel(logging.DEBUG)
        fit.check_trainer(self._run_config.get("trainer"), runs=name is not None)
        fit.check_ckpt_path(self._run_config.get("ckpt_path"))

    @property
    def _run_config(self) -> Namespace:
        """The parsed configuration of the run, which stands below the name of the subcommand if there is one."""
        return self.config.get(str(self.config.get("subcommand")), self.config)

    def before_instantiate_classes(self) -> None:
        """Give ``16-mixed`` to a strategy of this package by the plugin: Lightning makes bf16 of the flag on CPU."""
        super().before_instantiate_classes()
        fit.give_fp16_by_plugin(self._run_config.get("trainer"))

    def instantiate_classes(self) -> None:
        """Lightning's; what a constructor raises is kept by the parser, and a second run saves its configuration."""
        # After, and so behind, those of the model and the data.
        self.parser.add_instantiator(lambda class_type, *args, **kwargs: class_type(*args, **kwargs), object)
        if not self.save_config_kwargs:
            # Lightning refuses to run twice in one folder, as happens to a run without a logger that makes a new one
            # each time: then a validation of what was just trained fails, or would replace its configuration.
            name = "config.yaml" if self.subcommand in (None, "fit") else f"config_{self.subcommand}.yaml"
            self.save_config_kwargs = {"overwrite": True, "config_filename": name}
        super().instantiate_classes()
        strategy = getattr(self.trainer, "strategy", None)
        if not getattr(getattr(strategy, "preemption", None), "signals", ()):
            release_signals()  # nobody else notes them

    def after_fit(self) -> None:
        """Say where the checkpoint is, and how to validate it and go on; rank 0."""
        if self.trainer.is_global_zero:
            self._print_checkpoints()

    def _print_checkpoints(self) -> bool:
        path, last = fit.print_checkpoints(self.trainer)
        if path and self.subcommand == "fit" and self._arguments and self.trainer.enable_validation:
            arguments = fit.validate_arguments(self._arguments, path)
            print(f"validate it with: {_program(self.parser.prog)} {shlex.join(arguments)}")
            arguments = ["fit", *arguments[1:-1], last]
            print(f"resume with: {_program(self.parser.prog)} {shlex.join(arguments)}")
        return bool(path)


def _program(prog: str) -> str:
    return f"python {prog}" if prog.endswith(".py") else prog
