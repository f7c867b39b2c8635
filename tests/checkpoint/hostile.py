"""A pickle that runs code when it is opened, and says so."""

from __future__ import annotations

from typing import Any

RAN: list[str] = []


def ran(*args: Any) -> str:
    """What a hostile pickle calls."""
    RAN.append("ran")
    return "ran"


class Hostile:
    """Runs `ran` when it is unpickled."""

    def __reduce__(self) -> Any:
        return ran, ("x",)
