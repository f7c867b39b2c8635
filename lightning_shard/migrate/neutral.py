"""What the fields of all sources ask for, in neutral terms: the form between every source and every engine."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from lightning_shard import text
from lightning_shard.engines.zero.config.reading import parse_number
from lightning_shard.mesh import MeshConfig

Engine = Literal["ddp", "fsdp", "deepspeed"]

LEVELS = ("none", "optimizer", "gradients", "parameters")
"""What is sharded, as values of the neutral setting ``shard``; their indices are ZeRO's stages."""

MESH = {axis.name: axis.default for axis in fields(MeshConfig)}
"""The mesh's axes to their sizes where nothing is said."""


@dataclass(frozen=True)
class Line:
    """What a field of a source asks for, and then what became of it: a line of the table."""

    field: str  # With dots.
    given: Any  # The value as the source has it.
    name: str = ""  # The setting, a key of `counterparts.TABLE`; once it is written, where, with dots; "": nowhere.
    value: Any = None  # In the form that this package's YAML has it.
    note: str = ""  # What differs in numbers, or why there is no counterpart.
    nearest: str = ""  # What comes nearest to a counterpart.


Effect = Literal["numbers", "memory", "speed"]  # What a field without a counterpart would have changed.


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a source, and what becomes of it."""

    kind: str = "any"  # What its value must be: a key of `KINDS`.
    name: str = ""  # The neutral setting that it becomes; "": none, see below.
    # Allowed values to neutral ones; empty: every value of its kind, as it is.
    words: Mapping[Any, Any] = field(default_factory=dict)
    idle: tuple[Any, ...] = ()  # Values that ask for nothing.
    met: str = ""  # Why other values hold without a setting; "": they do not.
    reason: str = ""  # Why other values have no counterpart.
    nearest: str = ""  # What comes nearest to those.
    effect: Effect = "numbers"  # What those change.
    note: str = ""  # What differs in numbers once it has become the setting.


READ_ELSEWHERE = Field()  # Its meaning depends on others, so that it is read by a function.


@dataclass(kw_only=True)
class Reading:
    """What came of reading one or several sources; readers add to it."""

    engine: Engine | None = None  # Whose settings ``asked`` are; None: the source names no strategy.
    asked: list[Line] = field(default_factory=list)
    met: list[Line] = field(default_factory=list)  # Fields that need no setting.
    lost: list[Line] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # Fields that ask for nothing, such as ``debug false``.
    others: list[str] = field(default_factory=list)  # Fields of other subjects.
    # Unknown keys, wrong types, contradictions: one sentence each, without its full stop.
    problems: list[str] = field(default_factory=list)
    # A Lightning YAML's content without the strategy, to be written as it is.
    carried: dict[str, Any] = field(default_factory=dict)

    def ask(self, name: str, value: Any, field: str, given: Any, note: str = "") -> None:
        self.asked.append(Line(field, given, name, value, note))

    def meet(self, field: str, given: Any, note: str) -> None:
        """Add a field that needs no setting; ``note`` says why it holds without one."""
        self.met.append(Line(field, given, note=note))

    def lose(self, field: str, given: Any, reason: str, nearest: str = "", effect: Effect = "numbers") -> None:
        """Add a field without a counterpart; one that changes no number is a line of the table, and no loss."""
        if effect == "numbers":
            self.lost.append(Line(field, given, note=reason, nearest=nearest))
        else:
            self.meet(field, given, f"{effect} alone: {reason}" + f"; nearest: {nearest}" * bool(nearest))

    def rest(self, field: str, given: Any) -> None:
        self.idle.append(f"{field} {shown(given)}")

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a setting, or ``default`` where nobody asks for it."""
        return next((asked.value for asked in reversed(self.asked) if asked.name == name), default)

    def read_fields(self, path: str, table: Mapping[str, Field], content: Mapping[str, Any]) -> dict[str, Any]:
        """Add what the fields of a table ask for, but those that are read elsewhere; returns what their values mean."""
        own = {name: described for name, described in table.items() if described != READ_ELSEWHERE}
        prefix = f"{path}." if path else ""
        return {name: self.read_field(prefix + name, own[name], content.get(name)) for name in own}

    def read_field(self, path: str, described: Field, value: Any) -> Any:
        """Add what one field asks for, and return what its value means; None: nothing, or a problem."""
        if value is None:
            return None
        try:  # An idle word, such as auto, may stand for what is else a number.
            value = value if isinstance(value, str) and value in described.idle else KINDS[described.kind](value)
        except ValueError as error:
            self.problems.append(f"{path} is {shown(value)!r}, but must be {error}")
            return None
        is_idle = any(_same(value, idle) for idle in described.idle)
        means = [meaning for word, meaning in described.words.items() if _same(value, word)]
        if described.words and not (means or is_idle):
            words = list(dict.fromkeys(map(shown, [*described.idle, *described.words])))
            near = nearest(str(value), words)
            self.problems.append(f"{path} is {shown(value)!r}, but must be one of {', '.join(words)}{near}")
            return None
        meaning = means[0] if means else value
        if is_idle:
            self.rest(path, value)
        elif described.met:
            self.meet(path, value, described.met)
        elif described.reason:
            self.lose(path, value, described.reason, described.nearest, described.effect)
        elif described.name:
            self.ask(described.name, meaning, path, value, described.note)
        return meaning

    def prefixed(
        self, path: str, content: Mapping[str, Any], prefix: str, known: Collection[str], old: Mapping[str, str]
    ) -> dict[str, Any]:
        """``content`` with the prefix that keys may lack, ``old`` spellings as the new; problems for unknown keys."""
        every = [*known, *old]
        self.check_keys(path, content, [*every, *(name.removeprefix(prefix) for name in every)], path)
        named = {key if str(key).startswith(prefix) else f"{prefix}{key}": value for key, value in content.items()}
        return {old.get(key, key): value for key, value in named.items()}

    def check_keys(self, path: str, content: Mapping[Any, Any], known: Collection[str], whose: str) -> None:
        """A problem for every key of ``content`` that is not known, with the nearest one."""
        for key in content:
            if key not in known:
                where = f"{path}.{key}" if path else str(key)
                every = ", ".join(sorted(key for key in known if not key.endswith("+")))
                near = nearest(str(key), known) or f"; known are {every}"
                self.problems.append(f"{where} is no key of {whose}{near}")


def shown(value: Any) -> str:
    """A value on one line, as YAML would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return f"{value:.1f}" if abs(value) < 1e5 else f"{value:g}"
    return str(value)


def setting(name: str, kind: str, *idle: Any, **more: Any) -> Field:
    return Field(name=name, kind=kind, idle=idle, **more)


def nearest(word: str, choices: Collection[str]) -> str:
    return "".join(f": the nearest is {near!r}" for near in text.nearest(word, choices))


def _same(one: Any, other: Any) -> bool:
    """Whether they are equal, as words in whatever case, and a number as the word for it."""
    return bool(one == other) or str(one).upper() == str(other).upper()


def _reader(kind: Any, rule: str) -> Callable[[Any], Any]:
    adapter = TypeAdapter(kind, config={"str_strip_whitespace": True})

    def read(value: Any) -> Any:
        # YAML 1.1, which PyYAML reads, takes 1e8 for a word.
        is_text = isinstance(value, str) and kind is not str
        try:
            return adapter.validate_python(parse_number(value) if is_text else value)
        except ValidationError as error:
            raise ValueError(rule) from error

    return read


def _names(value: Any) -> list[str]:
    """Names as a list, or as one string with commas."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value):
        return list(value)
    raise ValueError("names, as a list or with commas between them")


KINDS: Mapping[str, Callable[[Any], Any]] = {
    "any": lambda value: value,
    "bool": _reader(bool, "true or false"),
    "int": _reader(int, "a whole number"),
    "float": _reader(FiniteFloat, "a number"),
    "count": _reader(NonNegativeInt, "a whole number of 0 or more"),
    "str": _reader(str, "a string"),
    "names": _names,
}
"""Kind to the function that reads it; the text of its ValueError follows "but must be"."""


@cache
def _tables(file: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def rows(file: str, section: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and row, of a section of a table beside this module."""
    for names, row in _tables(file)[section].items():
        yield from ((name, row) for name in names.split())


def field_of(idle: Sequence[Any] = (), **row: Any) -> Field:
    return Field(idle=tuple(idle), **row)


def described(section: str) -> dict[str, Field]:
    """The fields of a section of ``fields.yaml``."""
    return {name: field_of(**row) for name, row in rows("fields.yaml", section)}
