"""Text for people: tables in columns, and what is nearest to a word that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table with a line for each row, its cells below each other and two spaces between them.

    ``numbers``: all columns but the first are aligned to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def nearest(word: str, choices: Iterable[str], *, count: int = 1) -> list[str]:
    """At most ``count`` of the choices that resemble a word, the most similar first; case makes no difference."""
    lower = {choice.lower(): choice for choice in choices}
    return [lower[near] for near in difflib.get_close_matches(word.lower(), lower, count, cutoff=0.5)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``" Did you mean A or B?"`` with the choices nearest to a word, at most three; ``""`` where none is near."""
    near = nearest(word, choices, count=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""
