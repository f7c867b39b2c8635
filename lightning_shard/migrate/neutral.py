"""What the fields of all sources ask for, in neutral terms: the form between every source and every engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Engine = Literal["ddp", "fsdp", "deepspeed"]

LEVELS = ("none", "optimizer", "gradients", "parameters")
"""What is sharded, as values of the neutral setting ``shard``; their indices are ZeRO's stages."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One thing that a field asks for."""

    name: str  # The setting, a key of `counterparts.TABLE`.
    value: Any  # In the form that this package's YAML has it.
    field: str  # The source's own field, with dots.
    given: Any  # The value as the source has it.
    note: str = ""  # What differs in numbers, or why.


@dataclass(frozen=True, kw_only=True)
class Became:
    """What became of a field: a line of the table."""

    field: str
    given: Any
    target: str = ""  # Where it went, with dots; "" where it needs no setting.
    value: Any = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A field without a counterpart."""

    field: str
    given: Any
    reason: str
    nearest: str  # What comes nearest; "" where nothing does.


@dataclass(kw_only=True)
class Reading:
    """What came of reading one or several sources; readers add to it."""

    engine: Engine | None = None  # Whose settings ``asked`` are; None: the source names no strategy.
    asked: list[Asked] = field(default_factory=list)
    met: list[Became] = field(default_factory=list)  # Fields that need no setting.
    lost: list[Lost] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # Fields that ask for nothing, such as ``debug false``.
    # Unknown keys, wrong types, contradictions: one sentence each, without its full stop.
    problems: list[str] = field(default_factory=list)
    # A Lightning YAML's content without the strategy, to be written as it is.
    carried: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, str] = field(default_factory=dict)  # What the launcher is to be told: variable to value.

    def ask(self, name: str, value: Any, field: str, given: Any, note: str = "") -> None:
        """Add a setting."""
        self.asked.append(Asked(name=name, value=value, field=field, given=given, note=note))

    def meet(self, field: str, given: Any, note: str) -> None:
        """Add a field that needs no setting."""
        self.met.append(Became(field=field, given=given, note=note))

    def lose(self, field: str, given: Any, reason: str, nearest: str = "") -> None:
        """Add a field without a counterpart."""
        self.lost.append(Lost(field=field, given=given, reason=reason, nearest=nearest))

    def rest(self, field: str, given: Any) -> None:
        """Add a field that asks for nothing."""
        self.idle.append(f"{field} {shown(given)}")

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a setting, or ``default`` where nobody asks for it."""
        return next((asked.value for asked in reversed(self.asked) if asked.name == name), default)


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
