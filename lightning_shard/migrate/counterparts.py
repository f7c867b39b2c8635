"""The table of counterparts: what each setting, named as this package's own argument where there is one, is for each
engine. Settings that depend on each other are in ``dependent_settings.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.migrate.neutral import Engine, Field, field_of, rows

CLASSES: Mapping[Engine, str] = {
    "ddp": "lightning_shard.ShardDDPStrategy",
    "fsdp": "lightning_shard.ShardFSDPStrategy",
    "deepspeed": "lightning_shard.ShardDeepSpeedStrategy",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What engines answer to a setting, as their fields would; None: one has the same, under the same name."""

    ddp: Field | None = None
    fsdp: Field | None = None
    deepspeed: Field | None = None
    kind: str = "any"  # Of the values that this package's own YAML has: a key of `KINDS`.


def _rows(section: str) -> dict[str, Row]:
    def row(kind: str = "any", without: str = "", **given: Any) -> Row:
        own = {engine: field_of(**given.pop(engine)) for engine in CLASSES if engine in given}
        lacking: dict[str, Any] = dict.fromkeys(without.split(), field_of(**{"note": "it is so anyway", **given}))
        return Row(kind=kind, **lacking, **own)

    return {name: row(**described) for name, described in rows("counterparts.yaml", section)}


TABLE, CONFIG, _OTHERS = _rows("settings"), _rows("config"), _rows("others")
_NUMBERS = ("gradient_allreduce_op", "torch_autocast", "data_types", "bf16.", "fp16.")
"""What keys without a row begin with that change numbers; others are of speed, of memory or of what is printed."""


def find(name: str) -> Row:
    """The row of a setting; of ``config.KEY``, that of a key which DeepSpeed keeps in ``config``."""
    key = name.removeprefix("config.")
    other = _OTHERS["numbers" if key.startswith(_NUMBERS) else "speed"]
    return TABLE.get(name) or CONFIG.get(key) or CONFIG.get(key.partition(".")[0]) or other
