"""Bytes that one optimizer step sends, per collective and mesh axis, inside and between nodes.

Formulas: with a ring over k ranks, an all-gather and a reduce-scatter of n bytes send ``(k - 1) / k * n`` from every
rank to the next one, an all-reduce twice that (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"; NCCL's ``nccl-tests/doc/PERFORMANCE.md``). No algorithm sends less. A ring through several
nodes leaves each node once, so that between nodes one group sends that much per node, not per device; groups that run
side by side (hybrid sharding has one for each device of a node) each send their own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_shard.errors import ConfigurationError

FACTORS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


@dataclass(frozen=True, kw_only=True)
class Nodes:
    nodes: int
    devices: int  # Per node, and so processes.

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in an optimizer step."""

    kind: str  # One of `FACTORS`.
    what: str
    axis: str = "all"  # Or the mesh axis.
    ranks: int  # Of one group.
    stride: int = 1  # Ranks from one member of a group to the next.
    payload: int  # Bytes of the full tensors that each rank has after or before the collectives, summed over a step.

    @property
    def sent(self) -> float:
        return FACTORS[self.kind] * (self.ranks - 1) / self.ranks * self.payload

    def inside(self, nodes: Nodes) -> float:
        """Bytes that a device sends to others of its node."""
        return self.sent if self._members(nodes) > 1 else 0.0

    def between(self, nodes: Nodes) -> float:
        """Bytes that a node sends to others."""
        members = self._members(nodes)
        return 0.0 if members >= self.ranks else self.sent * nodes.devices / members

    def nodes(self, nodes: Nodes) -> int:
        """Of how many nodes a group has members."""
        return -(-self.ranks // self._members(nodes))

    def _members(self, nodes: Nodes) -> int:
        """Ranks of a group on one node."""
        return max(1, min(self.ranks, nodes.devices // self.stride))


FORMAT = "lightning_shard links 1"
_SPEEDS = ("intra_node", "inter_node")
_REACHED = ("products", "single", "memory", "host", "launch")


@dataclass(frozen=True, kw_only=True)
class Links:
    """What links carry in collectives."""

    intra_node: float | None  # Bytes per second of a device to others of its node; None: no two ranks shared one.
    inter_node: float | None  # Bytes per second of a node to others; None: there was one node.
    # What a device reaches, by the fields of `lightning_shard.planning.operators.Device`; empty: it was not measured.
    device: Mapping[str, float] = field(default_factory=dict)


def write_links(links: Links, path: Path) -> None:
    """Write them as JSON, in bytes per second."""
    content: dict[str, object] = {
        "format": FORMAT,
        **{f"{name}_bytes_per_second": getattr(links, name) for name in _SPEEDS},
    }
    if links.device:
        content["device"] = dict(links.device)
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"--output {path} can't be written: {error.strerror}. Name a file in a folder that exists."
        ) from error


def read_links(path: Path) -> Links:
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
    device = content.get("device", {})
    if not isinstance(device, dict) or (device and sorted(device) != sorted(_REACHED)):
        raise ConfigurationError(f"--links {path}: device has {device!r}, and not {', '.join(_REACHED)}. {_MAKE}")
    speeds = {name: _speed(path, f"{name}_bytes_per_second", content) for name in _SPEEDS}
    return Links(**speeds, device={name: _speed(path, name, device) or 0.0 for name in device})


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
