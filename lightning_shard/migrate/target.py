"""What is being written for one engine, what became what, and what is lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_shard.migrate.neutral import LEVELS, Asked, Became, Engine, Lost, Reading

CLASSES: Mapping[Engine, str] = {
    "ddp": "lightning_shard.ShardDDPStrategy",
    "fsdp": "lightning_shard.ShardFSDPStrategy",
    "deepspeed": "lightning_shard.ShardDeepSpeedStrategy",
}


@dataclass(kw_only=True)
class Target:
    """What is being written for one engine; ``translation.py`` and ``dependent_settings.py`` add to it."""

    engine: Engine
    arguments: dict[str, Any]  # Of the strategy, nested as its YAML is.
    told: bool  # Whether the user gave the strategy's name, whose arguments hold whatever the sources ask for.
    reading: Reading
    trainer: dict[str, Any] = field(default_factory=dict)  # Settings of the Trainer's.
    fixed: frozenset[str] = field(init=False)  # Arguments of a name that the user gave.
    rows: list[Became] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Remember what a name has set."""
        self.fixed = frozenset(self.arguments)

    @property
    def stage(self) -> int:
        """ZeRO's, of a DeepSpeed target."""
        return int(self.arguments.get("stage", 2))

    def set(self, asked: Asked, path: str, value: Any, note: str = "") -> None:
        """Write a setting at a path that begins with ``strategy.`` or ``trainer.``."""
        root, _, rest = path.partition(".")
        content = self.arguments if root == "strategy" else self.trainer
        *groups, key = rest.split(".")
        for group in groups:
            content = content.setdefault(group, {})
        content[key] = copy.deepcopy(value)
        self.note(asked, path, value, note)

    def note(self, asked: Asked, path: str, value: Any, note: str = "") -> None:
        """Add a line to the table without writing anything."""
        text = "; ".join(part for part in (asked.note, note) if part)
        self.rows.append(Became(field=asked.field, given=asked.given, target=path, value=value, note=text))

    def hold(self, asked: Asked, note: str) -> None:
        """A line for what needs no setting."""
        self.note(asked, "", None, note)

    def lose(self, asked: Asked, reason: str, nearest: str = "") -> None:
        """A field without a counterpart."""
        self.lost.append(Lost(field=asked.field, given=asked.given, reason=reason, nearest=nearest))

    def default(self, asked: Asked, path: str, note: str = "") -> None:
        """A line for what is the target's default already."""
        self.note(asked, path, "the default", note)


def level_of(engine: Engine, arguments: Mapping[str, Any]) -> str:
    """What a strategy's arguments shard, in words."""
    if engine == "ddp":
        return "everything on every process"
    if engine == "deepspeed":
        stage = int(arguments.get("stage", 2))
        return f"stage {stage}: {LEVELS[stage]} sharded" if stage else "stage 0: nothing sharded"
    if arguments.get("reshard_after_forward") is False:
        return "parameters kept gathered after forward"
    return "parameters sharded"
