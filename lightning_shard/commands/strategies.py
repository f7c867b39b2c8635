"""``lightning-shard strategies [NAME]``: print the table of strategy names, or the YAML that equals one of them."""

import argparse
import inspect
from collections.abc import Sequence

from lightning_shard import registry
from lightning_shard.commands import COMMANDS
from lightning_shard.commands.options import options_parser
from lightning_shard.text import columns


def parser() -> argparse.ArgumentParser:
    parser = options_parser("strategies", COMMANDS["strategies"])
    parser.add_argument("name", nargs="?", help="a strategy name (default: print the table of names)")
    return parser


def main(arguments: Sequence[str]) -> int:
    name = parser().parse_args(arguments).name
    if name is None:
        print(table())
        return 0
    import yaml

    preset = registry.find(name)
    parameters = inspect.signature(preset.strategy_class).parameters.values()
    others = yaml.safe_dump({p.name: p.default for p in parameters if p.name not in preset.init_args})
    print(preset_yaml(name) + "# further init_args, as they are by default:")
    print("\n".join(f"#      {line}" for line in others.splitlines()))
    return 0


def preset_yaml(name: str) -> str:
    """Return the YAML that equals ``trainer.strategy: NAME``, with ``class_path`` and ``init_args``."""
    import yaml

    preset = registry.find(name)
    strategy = {"class_path": preset.class_path, "init_args": dict(preset.init_args)}
    return yaml.safe_dump({"trainer": {"strategy": strategy}}, sort_keys=False)


def table() -> str:
    return columns([(preset.name, preset.description) for preset in registry.PRESETS.values()])
