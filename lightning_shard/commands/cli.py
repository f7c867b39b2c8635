"""`ShardCLI`: LightningCLI with this package's strategies, commands and messages, and the checks of a configuration
before ``fit``, ``validate``, ``test`` and ``predict``.
"""

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard import callbacks, commands, registry
from lightning_shard._lightning.configured_cli import ConfiguredCLI
from lightning_shard._lightning.messages import filter_messages
from lightning_shard.arguments import imported
from lightning_shard.checkpoint.files.layout import other_form
from lightning_shard.checkpoint.files.manifest import other_content
from lightning_shard.cluster.preemption import release_signals
from lightning_shard.commands import failures
from lightning_shard.commands.options import UsageError
from lightning_shard.commands.parser import ShardArgumentParser
from lightning_shard.engines.zero.config.reading import read_file
from lightning_shard.precision.policy import ALL, SHORT_FORMS
from lightning_shard.precision.words import PRECISIONS
from lightning_shard.strategies import ddp, deepspeed, fsdp
from lightning_shard.strategies.strategy import ShardStrategy

# The parser resolves short class names among imported classes.
FOUND_BY_SHORT_NAMES = (callbacks, ddp, deepspeed, fsdp)


class ShardCLI(ConfiguredCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` with this package's strategies, commands and messages.

    Without ``model_class`` and ``datamodule_class`` the configuration names the LightningModule and the
    LightningDataModule by ``class_path``. Modules are also imported from the current folder::

        from lightning_shard import ShardCLI

        ShardCLI(MyModule, MyDataModule)

    Args:
        model_class: the LightningModule, or a function that returns one (default: named in the configuration).
        datamodule_class: the LightningDataModule, likewise.
        args: arguments to parse in place of ``sys.argv[1:]``: a list of words, or a configuration as a mapping.
        environ: the launcher's environment, from which the rank is read (default: this process's).
        **kwargs: LightningCLI's other arguments.

    Raises:
        SystemExit: after a user's mistake, with code 2 on every rank and the error as ``__cause__``. After one of this
            package's commands, with its exit code.
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
        # As ``python -m`` does. A console script has its own folder here instead.
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        filter_messages()
        kwargs.setdefault("parser_class", ShardArgumentParser)
        kwargs["parser_kwargs"] = {"version": commands.versions(), **(kwargs.get("parser_kwargs") or {})}
        # Other keys of `parser_kwargs` may be subcommands, which then all have to be built.
        self._builds_one = not kwargs["parser_kwargs"].keys() - {"version", "prog", "description"}
        try:
            words = self._arguments[1:] if self._arguments[:1] == ["--traceback"] else self._arguments
            if kwargs.get("run", True) and words and words[0] in commands.COMMANDS:
                raise SystemExit(commands.run_command(words[0], words[1:]))
            super().__init__(model_class, datamodule_class, args=args, **kwargs)
        except SystemExit as ended:
            # Lightning itself ends the process after Ctrl-C.
            if isinstance(ended.__context__, KeyboardInterrupt) and self.trainer.is_global_zero:
                print(f"interrupted at step {self.trainer.global_step}")
                self._print_checkpoints(wanted=True)
            raise
        except Exception as error:
            cause = failures.cause_of(error, getattr(getattr(self, "parser", None), "failure", None))
            self._report(cause)
            if cause is error:
                raise
            raise cause from None

    def _report(self, error: Exception) -> None:
        """Print a user's mistake and exit. Return if ``error`` is to be raised."""
        failures.end_command(error, getattr(self, "trainer", None), self._arguments, self._environ)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Add ``--traceback``, and show docstrings of dataclass fields in the help."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        parser = super().init_parser(**kwargs)
        parser.add_argument("--traceback", action="store_true", help="Show the stack of frames of a mistake too.")
        return parser

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return Lightning's subcommands, or only the one in use: building a parser takes 0.1 s."""
        every = super().subcommands()
        first = self._arguments[0] if self._arguments else ""
        return {first: every[first]} if first in every and self._builds_one else every

    def setup_parser(self, add_subcommands: bool, *args: Any, **kwargs: Any) -> None:
        """Build Lightning's parsers, and list this package's commands in the help."""
        super().setup_parser(add_subcommands, *args, **kwargs)
        if add_subcommands and isinstance(self.parser, ShardArgumentParser):
            own = self.parser.subcommands.choices
            if "fit" in own:
                own["fit"].add_argument("--verbose", action="store_true", help="Show the table of measured dtypes too.")
            for name, text in commands.COMMANDS.items() if len(own) > 1 else ():
                # Only for the help: `__init__` runs these before parsing.
                self.parser.subcommands.add_subcommand(name, type(self.parser)(description=text), help=text)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse into ``self.config``, and make the checks that need no Trainer."""
        if parser.parser_mode == "yaml":
            # jsonargparse does not name the file that is no YAML mapping.
            for file in filter(Path.is_file, map(Path, commands.config_files(self._arguments))):
                read_file(file)
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        if name in commands.COMMANDS:
            raise UsageError(f"{name}: must be the first argument.")
        for config in (self.config, self._run_config):
            config.pop("traceback", None)  # not a part of the run that a saved config.yaml repeats
        if name == "fit" and self._run_config.pop("verbose"):
            logging.getLogger("lightning_shard").setLevel(logging.DEBUG)
        check_trainer(self._run_config.get("trainer"))
        check_ckpt_path(self._run_config.get("ckpt_path"))

    @property
    def _run_config(self) -> Namespace:
        """The parsed configuration of the run, without the level of the subcommand."""
        return self.config.get(str(self.config.get("subcommand")), self.config)

    def before_instantiate_classes(self) -> None:
        """Pass ``16-mixed`` by plugin to strategies of this package: Lightning turns the flag into bf16 on CPU."""
        super().before_instantiate_classes()
        trainer = self._run_config.get("trainer") or Namespace()
        if str(trainer.get("precision")) in ("16", "16-mixed") and _is_own(trainer.get("strategy")):
            plugins = trainer.get("plugins") or []
            own = Namespace(class_path="lightning_shard.ShardPrecision", init_args=Namespace(precision="16-mixed"))
            trainer["plugins"] = [*(plugins if isinstance(plugins, list | tuple) else [plugins]), own]
            trainer["precision"] = None

    def instantiate_classes(self) -> None:
        """Build the classes, and let a second run in one folder save its configuration."""
        if not self.save_config_kwargs:
            # Lightning refuses to overwrite config.yaml. Without a logger that makes a folder for each run, `validate`
            # after `fit` would fail, or replace the configuration of `fit`.
            name = "config.yaml" if self.subcommand in (None, "fit") else f"config_{self.subcommand}.yaml"
            self.save_config_kwargs = {"overwrite": True, "config_filename": name}
        super().instantiate_classes()
        strategy = getattr(self.trainer, "strategy", None)
        if isinstance(strategy, ShardStrategy):
            strategy.all_frames = "--traceback" in self._arguments
        if not getattr(getattr(strategy, "preemption", None), "signals", ()):
            release_signals()  # no strategy handles them

    def after_fit(self) -> None:
        """Print on rank 0 the checkpoint's path and the commands that validate it and resume from it."""
        if self.trainer.is_global_zero:
            if 0 in (self.trainer.num_training_batches, self.trainer.limit_train_batches):
                print("nothing was trained: the training dataloader has no batches")
            self._print_checkpoints(wanted=self.trainer.checkpoint_callback is not None)

    def _print_checkpoints(self, *, wanted: bool) -> None:
        callback, prog = self.trainer.checkpoint_callback, self.parser.prog
        if not isinstance(callback, ModelCheckpoint) or not (callback.best_model_path or callback.last_model_path):
            if wanted:
                print("no checkpoint was saved")
            return
        best, last = _shortest(callback.best_model_path), _shortest(callback.last_model_path)
        score = callback.best_model_score if best else None
        scored = "" if score is None else f" (best {callback.monitor}: {float(score):.6g})"
        print(f"checkpoint: {best or last}{scored}")
        if best and last and best != last:
            print(f"last checkpoint: {last}")
        loading = [path for path in (best, last) if path and other_form(path) != "hf"]
        if loading and self.subcommand == "fit" and self._arguments and self.trainer.enable_validation:
            program = f"python {prog}" if prog.endswith(".py") else prog
            arguments = validate_arguments(self._arguments, loading[0])
            print(f"validate it with: {program} {shlex.join(arguments)}")
            print(f"resume with: {program} {shlex.join(['fit', *arguments[1:-1], loading[-1]])}")


_CHECKPOINT_WORDS = ("auto", "best", "last", "hpc", "registry")


def check_trainer(trainer: Namespace | None) -> None:
    """Refuse wrong values that the Trainer takes, or refuses without naming the allowed ones."""
    settings = trainer or Namespace()
    strategy = settings.get("strategy")
    if isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry):
        raise UsageError(f"trainer.strategy: {registry.unknown_name(strategy)}")
    devices = str(settings.get("devices", "auto"))
    if not re.fullmatch(r"auto|-1|[1-9]\d*|\[?\d+(, *\d+)+,?\]?|\[\d+\]|\d+,", devices):
        raise UsageError(f"trainer.devices: got {devices}; allowed: a number of 1 or more, indices, or auto.")
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0), ("num_nodes", 1)):
        value = settings.get(name)
        if value is not None and value < least:
            raise UsageError(f"trainer.{name}: got {value}; allowed: {least} or more.")
    if settings.get("val_check_interval") == 0:
        raise UsageError("trainer.val_check_interval: got 0; allowed: a share of an epoch, batches, or a time.")
    precision = settings.get("precision")
    if _is_own(strategy) and precision is not None:
        word = SHORT_FORMS.get(str(precision), str(precision))
        if word not in PRECISIONS:
            raise UsageError(f"trainer.precision: got {precision}; strategies of lightning_shard run {ALL}.")


def check_ckpt_path(path: Any) -> None:
    """Refuse a local path without a checkpoint. Words and remote paths are Lightning's to check."""
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _CHECKPOINT_WORDS:
        return
    given = f"ckpt_path: {str(path)!r}"
    if not Path(path).exists():
        raise UsageError(f"{given} does not exist. Allowed: the path of a checkpoint, or one of auto, best, last.")
    if Path(path).is_file():
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK" and not start.startswith(b"\x80"):  # torch's zip files, and pickles of before torch 1.6
            allowed = other_content(Path(path)) or " Allowed: a checkpoint directory or a .ckpt file."
            raise UsageError(f"{given} is not a checkpoint.{allowed}")


def _is_own(strategy: Any) -> bool:
    """Say whether the parsed ``trainer.strategy`` names a strategy or class of this package."""
    if isinstance(strategy, str):
        return strategy.lower() in registry.PRESETS
    found = imported(getattr(strategy, "class_path", ""))
    return isinstance(found, type) and issubclass(found, ShardStrategy)


def _shortest(path: str) -> str:
    """Return the path relative to the current folder, if it is inside."""
    absolute = Path(path).absolute()
    return path and str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def validate_arguments(fit: Sequence[str], ckpt_path: str) -> list[str]:
    """Turn arguments of ``fit`` into those that validate a checkpoint."""
    pairs = zip(fit, ("", *fit), strict=False)
    arguments = [word for word, before in pairs if "--ckpt_path" not in (word.partition("=")[0], before)]
    arguments[arguments.index("fit")] = "validate"
    return [*arguments, "--ckpt_path", ckpt_path]
