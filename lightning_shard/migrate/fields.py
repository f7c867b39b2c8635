"""How a source's fields are described as data, and read by one function: kinds of values, unknown keys, one message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_shard import text
from lightning_shard.migrate.neutral import Reading, shown


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a source, and what becomes of it; made by `setting`, `satisfied` and `unsupported`."""

    kind: str = "any"  # What its value must be: a key of `KINDS`.
    name: str = ""  # The neutral setting that it becomes; "": none, see below.
    # Allowed values to neutral ones; empty: every value of its kind, as it is.
    words: Mapping[Any, Any] = field(default_factory=dict)
    idle: tuple[Any, ...] = ()  # Values that ask for nothing.
    met: str = ""  # Why other values hold without a setting; "": they do not.
    reason: str = ""  # Why other values have no counterpart.
    nearest: str = ""  # What comes nearest to those.
    note: str = ""  # What differs in numbers once it has become the setting.


READ_ELSEWHERE = Field()
"""A field whose meaning depends on others, so that it is read by a function and not by its description."""


def setting(name: str, kind: str, *idle: Any, words: Mapping[Any, Any] | None = None, note: str = "") -> Field:
    """A field that becomes the neutral setting ``name``; ``idle``: values that ask for nothing."""
    return Field(name=name, kind=kind, idle=idle, words=words or {}, note=note)


def satisfied(met: str, kind: str, *idle: Any) -> Field:
    """A field whose values hold without a setting, and why."""
    return Field(met=met, kind=kind, idle=idle)


def unsupported(
    reason: str, nearest: str = "", kind: str = "any", *idle: Any, words: Mapping[Any, Any] | None = None
) -> Field:
    """A field without a counterpart, and what comes nearest; ``idle``: values that ask for nothing."""
    return Field(reason=reason, nearest=nearest, kind=kind, idle=idle, words=words or {})


def read_fields(reading: Reading, path: str, table: Mapping[str, Field], content: Mapping[str, Any]) -> None:
    """Add to ``reading`` what the fields of a table ask for, without those that are read elsewhere."""
    for name, described in table.items():
        if described != READ_ELSEWHERE:
            read_field(reading, f"{path}.{name}" if path else name, described, content.get(name))


def read_field(reading: Reading, path: str, described: Field, value: Any) -> Any:
    """Add to ``reading`` what one field asks for, and return its value as its kind; None: nothing, or a problem."""
    if value is None:
        return None
    if isinstance(value, str) and value in described.idle:  # a word, such as auto, for what is else a number
        reading.rest(path, value)
        return value
    try:
        value = KINDS[described.kind](value)
    except ValueError as error:
        reading.problems.append(f"{path} is {shown(value)!r}, but must be {error}")
        return None
    if described.words:
        spelled = value.upper() if isinstance(value, str) else value
        found = next((key for key in described.words if key in (value, spelled)), None)
        if found is None and value not in described.idle and spelled not in described.idle:
            words = [*described.idle, *described.words]
            near = nearest(str(value), [str(word) for word in words])
            reading.problems.append(f"{path} is {shown(value)!r}, but must be one of {_listed(words)}{near}")
            return None
    else:
        found = spelled = value
    if value in described.idle or spelled in described.idle:
        reading.rest(path, value)
    elif described.met:
        reading.meet(path, value, described.met)
    elif described.reason:
        reading.lose(path, value, described.reason, described.nearest)
    elif described.name:
        became = described.words[found] if described.words else value
        reading.ask(described.name, became, path, value, described.note)
    return value


def check_keys(reading: Reading, path: str, content: Mapping[Any, Any], known: Collection[str], whose: str) -> None:
    """A problem for every key of ``content`` that is not known, with the nearest one."""
    for key in content:
        if key not in known:
            where = f"{path}.{key}" if path else str(key)
            near = nearest(str(key), known) or f"; known are {', '.join(sorted(known))}"
            reading.problems.append(f"{where} is no key of {whose}{near}")


def nearest(word: str, choices: Collection[str]) -> str:
    """``": the nearest is ..."``, or ``""``."""
    return "".join(f": the nearest is {near!r}" for near in text.nearest(word, choices))


def _listed(words: Collection[Any]) -> str:
    return ", ".join(dict.fromkeys(shown(word) for word in words))


def _bool(value: Any) -> bool:
    words = {"true": True, "false": False, "yes": True, "no": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError("true or false")


def _float(value: Any, expected: str = "a number") -> float:
    if isinstance(value, str):
        # YAML 1.1, which PyYAML reads, takes 1e8 for a word.
        try:
            value = float(value)
        except ValueError:
            raise ValueError(expected) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(expected)
    return value


def _int(value: Any) -> int:
    number = _float(value, "a whole number")
    if not float(number).is_integer():
        raise ValueError("a whole number")
    return int(number)


def _count(value: Any) -> int:
    number = _int(value)
    if number < 0:
        raise ValueError("a whole number of 0 or more")
    return number


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    raise ValueError("a string")


def _word(value: Any) -> Any:
    """A word or the number that stands for it."""
    if isinstance(value, str):
        return int(value) if value.strip().isdigit() else value.strip()
    if isinstance(value, int):
        return value
    raise ValueError("a word")


def _names(value: Any) -> list[str]:
    """Names as a list, or as one string with commas."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value):
        return list(value)
    raise ValueError("names, as a list or with commas between them")


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError("a mapping")


KINDS: Mapping[str, Callable[[Any], Any]] = {
    "any": lambda value: value,
    "bool": _bool,
    "int": _int,
    "count": _count,
    "float": _float,
    "str": _str,
    "word": _word,
    "names": _names,
    "mapping": _mapping,
}
"""Kind to the function that reads it; the text of its ValueError follows "but must be"."""
