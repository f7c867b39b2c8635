"""``lightning-shard strategies [NAME]``: the table of strategy names, and the YAML that equals one of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import yaml

from lightning_shard import registry
from lightning_shard.commands import COMMANDS
from lightning_shard.commands.parser import ShardArgumentParser
from lightning_shard.text import columns


def main(arguments: Sequence[str]) -> int:
    parser = ShardArgumentParser(prog="lightning-shard [options] strategies", description=COMMANDS["strategies"])
    parser.add_argument("name", nargs="?", type=str, help="a strategy name; without one: the table of names")
    name = parser.parse_args(list(arguments)).name
    print(table() if name is None else preset_yaml(name) + further_arguments(name))
    return 0


def preset_yaml(name: str) -> str:
    """The YAML that equals ``trainer.strategy: NAME``, with ``class_path`` and ``init_args``."""
    preset = registry.find(name)
    strategy = {"class_path": preset.class_path, "init_args": dict(preset.init_args)}
    return yaml.safe_dump({"trainer": {"strategy": strategy}}, sort_keys=False)


def further_arguments(name: str) -> str:
    """The constructor's other arguments with their defaults, as comments below `preset_yaml`."""
    preset = registry.find(name)
    parameters = inspect.signature(preset.strategy_class).parameters.values()
    others = {p.name: p.default for p in parameters if p.name not in preset.init_args}
    lines = yaml.safe_dump(others, sort_keys=True).splitlines()
    return "\n".join(["# further init_args, as they are by default:", *(f"#      {line}" for line in lines)])


def table() -> str:
    return columns([(preset.name, preset.description) for preset in registry.PRESETS.values()])
