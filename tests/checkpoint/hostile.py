"""A pickle that runs code when it is opened, and the check that none did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

RAN: list[str] = []


def ran(*args: Any) -> str:
    """What a hostile pickle calls."""
    RAN.append("ran")
    return "ran"


class Hostile:
    """Runs `ran` when it is unpickled."""

    def __reduce__(self) -> Any:
        return ran, ("x",)


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    """Of all that the tests of a module open, nothing ran."""
    RAN.clear()
    yield
    assert RAN == []
