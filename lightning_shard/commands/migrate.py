"""``lightning-shard migrate``: write the YAML for this package from what people have."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_shard import registry
from lightning_shard.commands.options import UsageError, options_parser
from lightning_shard.commands.parser import ShardArgumentParser
from lightning_shard.commands.slurm import refuse_to_replace
from lightning_shard.errors import ConfigurationError
from lightning_shard.migrate import Known, migrate, report
from lightning_shard.strategies.precision import ShardPrecision

_DESCRIPTION = """\
Write the YAML for this package from an Accelerate config file, a DeepSpeed file, or a Lightning YAML with a stock
strategy or one of this package; and a table of what became what. Several Lightning YAMLs are laid over one another,
as with --config; beside them one Accelerate or DeepSpeed file may say the strategy.

The YAML goes to --output and the table to stdout; without --output the YAML goes to stdout and the table to stderr.
A field that has no counterpart is refused, with the reason and what comes nearest, unless --lossy is given.
"""

_TOP_KEYS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only")
# Keys of the Trainer whose classes are carried over, and may not be importable here.
_CARRIED = ("callbacks", "logger", "profiler")


def parser() -> argparse.ArgumentParser:
    parser = options_parser("migrate", _DESCRIPTION)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="configuration to read")
    add("--to", metavar="NAME", help="strategy to write for, such as shard_fsdp (default: the engine of the file)")
    add("--lossy", action="store_true", help="go on without fields that have no counterpart; they become comments")
    add("--output", type=Path, metavar="FILE", help="file to write (default: stdout)")
    add("--force", action="store_true", help="replace the file that is at --output")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code. After an error nothing was written."""
    options = parser().parse_args(arguments)
    refuse_to_replace(options.output, options.force)
    if options.to is not None:
        options.to = registry.find(options.to.lower()).name
    # DeepSpeed's logger writes to what is stdout when it is imported, and there the YAML goes.
    with contextlib.redirect_stdout(sys.stderr):
        migration = migrate(options.files, known(), options.to)
        if migration.lost and not options.lossy:
            raise ConfigurationError(report.refusal(migration.lost))
        check(migration.content)
    command = shlex.join(["lightning-shard", "migrate", *arguments])
    text = report.document(migration.content, command=command, launch=migration.launch, lost=migration.lost)
    table = report.table(migration.rows, migration.idle, migration.lost)
    if options.output is None:
        print(table, file=sys.stderr, flush=True)
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
        print(f"{table}\nwritten to {options.output}")
    return 0


def known() -> Known:
    return Known(
        presets={name: (preset.class_path, preset.init_args) for name, preset in registry.PRESETS.items()},
        top_keys=_TOP_KEYS,
        trainer_keys=list(inspect.signature(Trainer).parameters),
    )


def check(content: Mapping[str, Any]) -> None:
    """Let the parser of ``lightning-shard fit`` read the Trainer's section but `_CARRIED`, and the strategy check."""
    trainer = {key: value for key, value in content["trainer"].items() if key.rstrip("+") not in _CARRIED}
    own = [plugin for plugin in trainer.get("plugins") or [] if _is_own(plugin)]
    trainer["plugins"] = own or None
    parser = ShardArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_instantiator(lambda class_type, *args, **kwargs: class_type(*args, **kwargs), object)
    try:
        parsed = parser.parse_object({"trainer": trainer})
        built = parser.instantiate_classes(parsed).trainer
    except UsageError as error:
        raise ConfigurationError(f"the result can't be used:\n{error}") from error
    except ValueError as error:
        failure = parser.failure or error
        raise ConfigurationError(f"the result can't be used:\n{failure}") from failure
    _ask(built)


def _is_own(plugin: Any) -> bool:
    return isinstance(plugin, Mapping) and str(plugin.get("class_path")) == "lightning_shard.ShardPrecision"


def _ask(trainer: Any) -> None:
    """Let the strategy check itself with the precision and the number of processes, as it does before a run."""
    strategy = registry.build(trainer.strategy) if isinstance(trainer.strategy, str) else trainer.strategy
    plugin = trainer.plugins[0] if trainer.plugins else ShardPrecision(trainer.precision or "32-true")
    strategy.precision_plugin = plugin
    strategy.num_nodes = trainer.num_nodes
    devices = trainer.devices
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else None
    strategy.parallel_devices = [torch.device("cpu")] * (count or 1)
    if count is None:
        _ = strategy.policy  # a mesh can't be checked against a number that nobody knows yet
    else:
        strategy.check()
