"""Runs that are killed again and again end with the weights of one that never was."""

from __future__ import annotations

import pytest

from examples.benchmarks.goodput import ENGINES, KINDS, PHASES, soak


@pytest.mark.soak
def test_kills_lose_nothing_under_any_engine() -> None:
    records = soak(ENGINES, kills=len(ENGINES) * len(KINDS), mean=5.0, seed=1, steps=60, every=5)
    for record in records:
        assert sorted(record.kinds) == sorted(KINDS)
        # A kill before the first step of an attempt has no restart of its own.
        assert record.phases
        row = record.row()
        assert 0 < row["effective"] < 1
        # A step more than an interval is lost where the kill comes in the save.
        assert max(record.lost_steps) <= 2 * 5
        assert all(row[phase] >= 0 for phase in PHASES)
