"""Neutral settings: the form between the sources' fields and the engines' arguments."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_shard import text
from lightning_shard.engines.zero.config.reading import parse_number
from lightning_shard.mesh import MeshConfig

Engine = Literal["ddp", "fsdp", "deepspeed"]

CLASSES: Mapping[Engine, str] = {
    "ddp": "lightning_shard.ShardDDPStrategy",
    "fsdp": "lightning_shard.ShardFSDPStrategy",
    "deepspeed": "lightning_shard.ShardDeepSpeedStrategy",
}

LEVELS = ("none", "optimizer", "gradients", "parameters")
"""Values of the neutral setting ``shard``. Their indices are ZeRO's stages."""

MESH = {axis.name: axis.default for axis in fields(MeshConfig)}
"""The mesh's axes with their default sizes."""


@dataclass(frozen=True)
class Line:
    """A field of a source with its setting, and a line of the printed table."""

    field: str  # The field's dotted path.
    given: Any  # The value in the source.
    name: str = ""  # The setting, named like this package's argument. In the table, the dotted path written to, or "".
    value: Any = None  # The setting's value in this package's YAML.
    note: str = ""  # A difference in numbers, or the reason for no counterpart.
    nearest: str = ""  # The nearest thing to a counterpart.


Effect = Literal["numbers", "memory", "speed"]  # Changed by a field without a counterpart.


@dataclass(frozen=True, kw_only=True)
class Field:
    """The rule by which one field of a source is read."""

    name: str = ""  # The neutral setting, or "" if there is none.
    words: Mapping[Any, Any] = field(default_factory=dict)  # Allowed values to neutral ones, empty if all are allowed.
    names: bool = False  # The value is a list of names, or one string with commas.
    idle: Sequence[Any] = ()  # Values that ask for nothing.
    met: str = ""  # The reason why other values hold without a setting.
    reason: str = ""  # The reason why other values have no counterpart.
    nearest: str = ""  # The nearest thing to a counterpart.
    effect: Effect = "numbers"  # Changed by a value without a counterpart.
    note: str = ""  # A difference in numbers under the setting.


READ_ELSEWHERE = Field()  # Read by a function, since the meaning depends on other fields.


@dataclass(kw_only=True)
class Reading:
    """The settings of one or several sources. Readers add to it."""

    engine: Engine | None = None  # The source's engine, None until a strategy is read.
    asked: list[Line] = field(default_factory=list)  # Fields with a setting.
    met: list[Line] = field(default_factory=list)  # Fields that need no setting.
    lost: list[Line] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # Fields that ask for nothing, such as ``debug false``.
    others: list[str] = field(default_factory=list)  # Fields of other subjects.
    problems: list[str] = field(default_factory=list)  # Mistakes, a sentence each without its full stop.
    carried: dict[str, Any] = field(default_factory=dict)  # A Lightning YAML without the strategy, copied as it is.

    def ask(self, name: str, value: Any, field: str, given: Any, note: str = "") -> None:
        self.asked.append(Line(field, given, name, value, note))

    def meet(self, field: str, given: Any, note: str) -> None:
        """Add a field that holds without a setting, with the reason in ``note``."""
        self.met.append(Line(field, given, note=note))

    def lose(self, field: str, given: Any, reason: str, nearest: str = "", effect: Effect = "numbers") -> None:
        """Add a field without a counterpart. It is lost if it changes numbers, and else only a line of the table."""
        if effect == "numbers":
            self.lost.append(Line(field, given, note=reason, nearest=nearest))
        else:
            self.meet(field, given, f"{effect} alone: {reason}" + f"; nearest: {nearest}" * bool(nearest))

    def rest(self, field: str, given: Any) -> None:
        self.idle.append(f"{field} {shown(given)}")

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or ``default`` if no field asks for it."""
        return next((asked.value for asked in reversed(self.asked) if asked.name == name), default)

    def read_fields(self, path: str, table: Mapping[str, Field], content: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of a table but `READ_ELSEWHERE`. Return their neutral values."""
        own = {name: described for name, described in table.items() if described != READ_ELSEWHERE}
        return {name: self.read_field(joined(path, name), own[name], content.get(name)) for name in own}

    def read_field(self, path: str, described: Field, value: Any) -> Any:
        """Add a field to the list that its rule says. Return its neutral value, None without one or for a problem."""
        if value is None:
            return None
        is_idle = any(_same(value, idle) for idle in described.idle)
        means = [meaning for word, meaning in described.words.items() if _same(value, word)]
        if described.words and not (means or is_idle):
            words = list(dict.fromkeys(map(shown, [*described.idle, *described.words])))
            near = nearest(str(value), words)
            self.problems.append(f"{path} is {shown(value)!r}, but must be one of {', '.join(words)}{near}")
            return None
        meaning = means[0] if means else plain(value)
        if described.names and isinstance(value, str):
            meaning = [name.strip() for name in value.split(",") if name]
        if is_idle:
            self.rest(path, value)
        elif described.met:
            self.meet(path, value, described.met)
        elif described.reason:
            self.lose(path, value, described.reason, described.nearest, described.effect)
        elif described.name:
            self.ask(described.name, meaning, path, value, described.note)
        return meaning

    def prefixed(self, path: str, content: Mapping[str, Any], prefix: str, known: Collection[str]) -> dict[str, Any]:
        """Add the prefix to keys that lack it. Note unknown keys as problems."""
        named = {str(key) if str(key).startswith(prefix) else f"{prefix}{key}": content[key] for key in content}
        self.check_keys(path, named, known, path)
        return named

    def check_keys(self, path: str, content: Mapping[Any, Any], known: Collection[str], whose: str) -> None:
        """Note every unknown key of ``content`` as a problem, with the nearest known key."""
        for key in content:
            if key not in known:
                near = nearest(str(key), known) or ": remove it"
                self.problems.append(f"{joined(path, key)} is no key of {whose}{near}")


def joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def shown(value: Any) -> str:
    """Write a value on one line, as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def nearest(word: str, choices: Collection[str]) -> str:
    return "".join(f": the nearest is {near!r}" for near in text.nearest(word, choices))


def plain(value: Any) -> Any:
    """Read a truth value or a number that is written as a word, as 1e8 is in YAML 1.1. A whole number is an int."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    words = {"true": True, "yes": True, "false": False, "no": False}
    return words.get(value.lower(), parse_number(value))


def _same(value: Any, word: Any) -> bool:
    """Compare without case."""
    return any(one == word or str(one).upper() == str(word).upper() for one in (value, plain(value)))


@cache
def _tables() -> Any:
    return yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text(encoding="utf-8"))


def rows(section: str) -> Iterator[tuple[str, Any]]:
    """Yield name and row of a section of ``fields.yaml``."""
    for names, row in _tables()[section].items():
        yield from ((name, row) for name in names.split())


def described(section: str) -> dict[str, Field]:
    return {name: Field(**row) for name, row in rows(section)}
