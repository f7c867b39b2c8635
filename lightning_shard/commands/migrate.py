"""``lightning-shard migrate``: write the YAML for this package from another tool's configuration."""

import argparse
import contextlib
import inspect
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard import registry
from lightning_shard.arguments import imported
from lightning_shard.commands import options as common
from lightning_shard.commands.cli import check_trainer
from lightning_shard.commands.parser import ShardArgumentParser
from lightning_shard.errors import ConfigurationError
from lightning_shard.migrate.lightning_strategies import STRATEGIES
from lightning_shard.migrate.lightning_yaml import Known
from lightning_shard.migrate.migration import document, refusal, table
from lightning_shard.migrate.migration import migrate as read_and_migrate
from lightning_shard.migrate.neutral import CLASSES, Engine
from lightning_shard.strategies.precision import ShardPrecision
from lightning_shard.text import parse_count

_DESCRIPTION = """\
Write the YAML for this package from an Accelerate config file, Hugging Face TrainingArguments (JSON or YAML), a
DeepSpeed file, or a Lightning YAML with a stock strategy or one of this package. Print a table of all fields and their
counterparts. Several Lightning YAMLs are merged, as with --config. One file of another kind may add the strategy.

The YAML goes to --output and the table to stdout; without --output the YAML goes to stdout and the table to stderr.
A field that has no counterpart is refused, with the reason and what comes nearest, unless --lossy is given.
"""

_MOST_DEVICES = 1024  # of a node
# Keys of the Trainer that are carried over unchecked, since their classes may not be importable here.
_CARRIED = ("callbacks", "logger", "profiler")


def parser() -> argparse.ArgumentParser:
    parser = common.options_parser("migrate", _DESCRIPTION)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="configuration to read")
    add("--to", metavar="NAME", help="strategy to write for, such as shard_fsdp (default: the engine of the file)")
    add("--lossy", action="store_true", help="leave out fields that have no counterpart, which become comments")
    common.add_output(parser, "file to write (default: stdout)")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    common.refuse_to_replace(options.output, options.force)
    done = migrate(options.files, to=options.to, lossy=options.lossy, command=["migrate", *arguments])
    if options.output is None:
        print(done.table, file=sys.stderr, flush=True)
        print(done.yaml, end="")
    else:
        common.write_output(options.output, done.yaml, options.force)
        print(f"{done.table}\nwritten to {options.output}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """A configuration for this package, made from another tool's."""

    content: Mapping[str, Any]
    """Configuration for ``lightning-shard fit --config``."""

    yaml: str
    """``content`` as text, with lost fields as comments."""

    table: str
    """A line for each field, with its counterpart."""

    lost: Sequence[str]
    """Fields without a counterpart."""


def migrate(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    to: str | None = None,
    lossy: bool = False,
    command: Sequence[str] = (),
) -> Migrated:
    """Turn an Accelerate, DeepSpeed or Lightning configuration into one for this package. One process calls it.

    Args:
        files: the configuration. Several Lightning YAMLs are merged.
        to: strategy name to write for (default: the source's own engine).
        lossy: leave out fields that have no counterpart.
        command: arguments of ``lightning-shard`` for the text's first line.

    Raises:
        ConfigurationError: mistakes in the files, fields that would be lost, and settings that the strategy refuses.
    """
    name = None if to is None else registry.find(to.lower()).name
    files = [files] if isinstance(files, str | os.PathLike) else files
    if not files:
        raise ConfigurationError("files is empty: give the configuration to read.")
    # DeepSpeed's logger keeps the stdout of its import and would write between the lines of the YAML.
    with contextlib.redirect_stdout(sys.stderr):
        content, target = read_and_migrate([Path(file) for file in files], known_names(), name)
        lost = target.reading.lost
        if lost and not lossy:
            raise ConfigurationError(refusal(lost))
        check_result(content)
    line = shlex.join(["lightning-shard", *(command or ["migrate", *map(str, files)])])
    text, fields = document(content, line, target.reading), [field.field for field in lost]
    return Migrated(content=content, yaml=text, table=table(target), lost=fields)


def known_names() -> Known:
    presets: dict[str, Any] = {name: (preset.class_path, preset.init_args) for name, preset in registry.PRESETS.items()}
    presets["auto"] = "lightning.pytorch.strategies.DDPStrategy", {}
    for name, entry in StrategyRegistry.items():
        if (kind := getattr(entry["strategy"], "__name__", "")) in STRATEGIES:
            arguments = {key: value for key, value in entry["init_params"].items() if value != "popen"}
            presets[name] = f"lightning.pytorch.strategies.{kind}", arguments
    signatures: dict[Engine, Any] = {
        engine: {name: p.default for name, p in inspect.signature(imported(path)).parameters.items()}
        for engine, path in CLASSES.items()
    }
    trainer_keys = list(inspect.signature(Trainer).parameters)
    return Known(presets=presets, arguments=signatures, top_keys=common.KEYS, trainer_keys=trainer_keys)


def check_result(content: Mapping[str, Any]) -> None:
    """Parse the Trainer's section without `_CARRIED` as ``lightning-shard fit`` does, and let the strategy check it."""
    trainer = {key: value for key, value in content["trainer"].items() if key.rstrip("+") not in _CARRIED}
    plugins = [plugin for plugin in trainer.get("plugins") or [] if isinstance(plugin, Mapping)]
    trainer["plugins"] = [p for p in plugins if p.get("class_path") == "lightning_shard.ShardPrecision"] or None
    parser = ShardArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    try:
        parsed = parser.parse_object({"trainer": trainer})
        check_trainer(parsed.trainer)
        built = parser.build(parsed).trainer
    except (common.UsageError, ValueError) as error:
        failure = error if isinstance(error, common.UsageError) else parser.failure or error
        raise ConfigurationError(f"the result can't be used:\n{failure}") from failure
    # The strategy checks itself with the precision and the number of processes, as before a run.
    strategy = registry.build(built.strategy) if isinstance(built.strategy, str) else built.strategy
    strategy.precision_plugin = built.plugins[0] if built.plugins else ShardPrecision(built.precision or "32-true")
    strategy.num_nodes, count = built.num_nodes, parse_count(built.devices)
    if count > _MOST_DEVICES:
        raise ConfigurationError(f"devices is {count}, but a node has at most {_MOST_DEVICES}.")
    strategy.parallel_devices = [torch.device("cpu")] * (count or 1)
    if count:
        strategy.check()
    else:
        _ = strategy.policy  # checks the precision alone: the mesh needs the number of processes
