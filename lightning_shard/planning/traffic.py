"""Compute the bytes that one optimizer step sends, per collective and mesh axis, inside and between nodes.

In a ring over k ranks, an all-gather and a reduce-scatter of n bytes send ``(k - 1) / k * n`` from every rank to the
next, and an all-reduce sends twice that (Patarasuk and Yuan 2009, NCCL's ``nccl-tests/doc/PERFORMANCE.md``). No
algorithm sends less. A ring leaves each node once, so a group sends that many bytes from each node. Parallel groups
(hybrid sharding has one for each device of a node) each send their own.
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
    devices: int  # Devices, and so processes, per node.

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in an optimizer step."""

    kind: str  # One of `FACTORS`.
    what: str
    axis: str = "all"  # The mesh axis, or "all".
    ranks: int  # Size of one group.
    stride: int = 1  # Distance between members of a group, in ranks.
    payload: int  # Bytes of full tensors on each rank before or after the collectives, summed over a step.

    @property
    def sent(self) -> float:
        return FACTORS[self.kind] * (self.ranks - 1) / self.ranks * self.payload

    def inside(self, nodes: Nodes) -> float:
        """Bytes that a device sends to others in its node."""
        return self.sent if self._members(nodes) > 1 else 0.0

    def between(self, nodes: Nodes) -> float:
        """Bytes that a node sends to others."""
        members = self._members(nodes)
        return 0.0 if members >= self.ranks else self.sent * nodes.devices / members

    def nodes(self, nodes: Nodes) -> int:
        """The number of nodes with members of a group."""
        return -(-self.ranks // self._members(nodes))

    def _members(self, nodes: Nodes) -> int:
        """Ranks of a group on one node."""
        return max(1, min(self.ranks, nodes.devices // self.stride))


FORMAT = "lightning_shard links 1"
_SPEEDS = {"intra_node": "intra_node_bytes_per_second", "inter_node": "inter_node_bytes_per_second"}
_REACHED = ("products", "single", "memory", "host", "launch")


@dataclass(frozen=True, kw_only=True)
class Links:
    intra_node: float | None  # Bytes per second from a device to others in its node. None: no two ranks shared a node.
    inter_node: float | None  # Bytes per second from a node to others. None: there was one node.
    # Measured rates by the fields of `lightning_shard.planning.operators.Device`. Empty: not measured.
    device: Mapping[str, float] = field(default_factory=dict)


def links_text(links: Links) -> str:
    content = {"format": FORMAT, **{key: getattr(links, name) for name, key in _SPEEDS.items()}}
    if links.device:
        content["device"] = dict(links.device)
    return json.dumps(content, indent=2) + "\n"


def read_links(path: Path) -> Links:
    """Read a file with the text of `links_text`. ConfigurationError: it has another content."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        speeds = {name: None if content[key] is None else float(content[key]) for name, key in _SPEEDS.items()}
        device = {name: float(content["device"][name]) for name in _REACHED} if content.get("device") else {}
        found = (*device.values(), *(speed for speed in speeds.values() if speed is not None))
        if not all(0 < speed < float("inf") for speed in found):
            raise ValueError("a speed is not greater than 0")
    except (OSError, ValueError, TypeError, KeyError) as error:
        make = "Make the file on the nodes of the run: srun lightning-shard doctor --output links.json."
        raise ConfigurationError(f"--links {path} has no speeds of links in it ({error}). {make}") from error
    return Links(**speeds, device=device)
