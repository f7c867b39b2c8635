"""The file in which ``lightning-shard doctor`` leaves the speeds of a machine's links for ``lightning-shard plan``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lightning_shard.errors import ConfigurationError

FORMAT = "lightning_shard links 1"
_SPEEDS = ("intra_node", "inter_node")


@dataclass(frozen=True, kw_only=True)
class Links:
    """The slowest link of each kind that was measured, which is what a collective goes as fast as."""

    intra_node: float | None  # Bytes per second between two ranks of a node; None: no two ranks shared one.
    inter_node: float | None  # Bytes per second between two ranks on different nodes; None: there was one node.


def write(links: Links, path: Path) -> None:
    """Write them as JSON, in bytes per second.

    Raises:
        ConfigurationError: the file can't be written.
    """
    content = {"format": FORMAT, **{f"{name}_bytes_per_second": getattr(links, name) for name in _SPEEDS}}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"--output {path} can't be written: {error.strerror}. Name a file in a folder that exists."
        ) from error


def read(path: Path) -> Links:
    """What `write` wrote.

    Raises:
        ConfigurationError: no such file, or another content.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"--links {path} can't be read: {reason}. {_MAKE}") from error
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigurationError(f"--links {path} has no speeds of links in it (format {FORMAT!r}). {_MAKE}")
    return Links(**{name: _speed(path, f"{name}_bytes_per_second", content) for name in _SPEEDS})


_MAKE = "Make the file on the nodes of the run: srun lightning-shard doctor --output links.json."


def _speed(path: Path, key: str, content: dict[str, object]) -> float | None:
    value = content.get(key)
    if value is None and key in content:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigurationError(
            f"--links {path}: {key} is {value!r}, but is a number of bytes per second greater than 0, or null. {_MAKE}"
        )
    return float(value)
