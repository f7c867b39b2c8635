"""The table of counterparts: each setting's answer on each engine. A setting is named like this package's argument, if
there is one. Settings that depend on each other are in ``dependent_settings.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.migrate.neutral import Engine, Field, rows

CLASSES: Mapping[Engine, str] = {
    "ddp": "lightning_shard.ShardDDPStrategy",
    "fsdp": "lightning_shard.ShardFSDPStrategy",
    "deepspeed": "lightning_shard.ShardDeepSpeedStrategy",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A setting's answers by engine. An engine without one has the setting under the same name."""

    answers: Mapping[Engine, Field]
    kind: str = "any"  # The kind of its values in this package's own YAML, a key of `KINDS`.


def _rows(section: str) -> dict[str, Row]:
    def row(kind: str = "any", without: str = "", **given: Any) -> Row:
        own = {engine: Field(**given.pop(engine)) for engine in CLASSES if engine in given}
        lacking: Any = dict.fromkeys(without.split(), Field(**{"note": "it is so anyway", **given}))
        return Row(kind=kind, answers={**lacking, **own})

    return {name: row(**described) for name, described in rows("counterparts.yaml", section)}


TABLE, CONFIG, _OTHERS = _rows("settings"), _rows("config"), _rows("others")
_NUMBERS = ("gradient_allreduce_op", "torch_autocast", "data_types", "bf16.", "fp16.")
"""Prefixes of keys without a row that change numbers. Other such keys change speed, memory or printing."""


def find_row(name: str) -> Row:
    """Return the row of a setting, or of a key that DeepSpeed keeps in ``config``, named ``config.KEY``."""
    key = name.removeprefix("config.")
    other = _OTHERS["numbers" if key.startswith(_NUMBERS) else "speed"]
    return TABLE.get(name) or CONFIG.get(key) or CONFIG.get(key.partition(".")[0]) or other
