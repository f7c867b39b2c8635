"""What an engine may answer to a setting: it has the same, it holds anyway, or there is no equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_shard.migrate.form import Engine


@dataclass(frozen=True, kw_only=True)
class Equal:
    """The engine has the same."""

    path: str = ""
    """Its argument, with dots; "": named as the setting is."""

    note: str = ""
    """What differs in numbers all the same."""


@dataclass(frozen=True, kw_only=True)
class Holds:
    """What is asked for holds without a setting."""

    note: str
    """Why."""

    values: tuple[Any, ...] | None = None
    """Of which values this is so; None: of all."""


@dataclass(frozen=True, kw_only=True)
class Without:
    """The engine has no equal."""

    reason: str
    """Why."""

    nearest: str = ""
    """What comes nearest; "": nothing."""


Answer = Equal | Holds | Without


@dataclass(frozen=True, kw_only=True)
class Row:
    """A setting on each engine."""

    ddp: tuple[Answer, ...]
    fsdp: tuple[Answer, ...]
    deepspeed: tuple[Answer, ...]
    kind: str = "any"
    """Of the values that this package's own YAML has: a key of ``fields.KINDS``."""

    def answer(self, engine: Engine, value: Any) -> Answer:
        """The engine's answer to a value."""
        answers: tuple[Answer, ...] = getattr(self, engine)
        fits = (a for a in answers if not isinstance(a, Holds) or a.values is None or _among(value, a.values))
        return next(fits)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)
