"""Which cases of a parametrized test run by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], *kept: int) -> list[Any]:
    """``cases`` of which those numbered ``kept`` run by default, and all others in the group ``matrix``."""
    assert set(kept) <= set(range(len(cases)))
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        case if number in kept else pytest.param(*value, marks=pytest.mark.matrix)
        for number, (case, value) in enumerate(zip(cases, values, strict=True))
    ]
