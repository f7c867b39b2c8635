"""What a migration says: the table of what became what, the refusal of what has no counterpart, and the YAML itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lightning_shard.migrate.neutral import Became, shown
from lightning_shard.text import columns

_WIDEST = 44


def table(rows: Sequence[Became], idle: Sequence[str], lost: Sequence[Became]) -> str:
    """Source field and value, target field and value, and a note; then lost fields, and what asked for nothing."""
    lines = [("source", "", "->", "target", "", "note")]
    for row in rows:
        value = shown(row.value) if row.target else ""
        lines.append((row.field, shown(row.given), "->", row.target or "(no setting)", value, row.note))
    lines += [(item.field, shown(item.given), "->", "none", "", _why(item)) for item in lost]
    # Values may be long; two fields that differ in their last letters are not to look the same.
    cut = [[*line[:1], _cut(line[1]), *line[2:4], _cut(line[4]), line[5]] for line in lines]
    return "\n".join([columns(cut), *([f"asking for nothing: {', '.join(idle)}"] if idle else [])])


def _cut(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 3]}..."


def _why(item: Became) -> str:
    return f"{item.note}; nearest: {item.nearest}" if item.nearest else item.note


def refusal(lost: Sequence[Became]) -> str:
    """The message that lists every field without a counterpart."""
    count = "1 field has" if len(lost) == 1 else f"{len(lost)} fields have"
    text = f"{count} no counterpart here, so that nothing was written:"
    for item in lost:
        near = f" Nearest: {item.nearest}." if item.nearest else ""
        text += f"\n  - {item.field}: {shown(item.given)}. {item.note[:1].upper()}{item.note[1:]}.{near}"
    return f"{text}\nWith --lossy the rest is written, and these stand in the file as comments."


def mistakes(problems: Sequence[str]) -> str:
    """The message that lists everything that is wrong with the sources."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return f"{unique[0]}."
    return f"{len(unique)} things are wrong:" + "".join(f"\n  - {problem}." for problem in unique)


def document(content: Mapping[str, Any], *, command: str, launch: Mapping[str, str], lost: Sequence[Became]) -> str:
    """The file that is written: what ``fit --config`` reads, below the command, the launcher's variables and lost
    fields.
    """
    lines = [f"# Written by `{command}`."]
    if launch:
        variables = " ".join(f"{name}={value}" for name, value in launch.items())
        lines.append(f"# Start on each machine, with its own NODE_RANK: {variables} lightning-shard fit --config FILE")
        lines.append("# (srun and torchrun set these variables themselves.)")
    lines += [f"# Not carried over: {item.field}: {shown(item.given)} ({_why(item)})" for item in lost]
    return "\n".join(lines) + "\n" + yaml.safe_dump(dict(content), sort_keys=False, width=100)
