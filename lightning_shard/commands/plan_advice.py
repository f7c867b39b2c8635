"""What ``lightning-shard plan`` recommends, why, and the YAML for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from lightning_shard.commands.strategies import preset_yaml
from lightning_shard.planning.quantities import show_bytes, show_seconds
from lightning_shard.planning.report import FORMS, Row
from lightning_shard.planning.traffic import Nodes


def recommendation(rows: Sequence[Row], *, memory: int, nodes: Nodes, precision: str | None) -> str:
    """The engine to use, why in one sentence, and the YAML for it.

    Args:
        rows: engines of this package, with every form of activation checkpointing.
        memory: bytes of a device that the run may use.
        nodes: its machines.
        precision: the Trainer's; None: a plugin says it, which stays as it is.
    """
    known = [row for row in rows if not row.refused]
    fitting = [row for row in known if row.most.device.total <= memory]
    if not fitting:
        least = min(known, key=lambda row: row.most.device.total)
        more = "" if least.fewest is None else f", or {least.fewest.ranks} devices for {least.title}"
        return (
            f"recommendation: nothing fits; {least.title} needs least, {show_bytes(least.most.device.total)} per "
            f"device: use a smaller batch{more}."
        )
    best = min(fitting, key=lambda row: _cost(row, nodes))
    reason = _reason(best, f"{len(fitting)} of {len(known)} forms fit", memory)
    return f"recommendation: {best.title}, because {reason}.\n\n{recommended_yaml(best, nodes, precision)}"


def _cost(row: Row, nodes: Nodes) -> tuple[Any, ...]:
    """What is compared, in this order: no offload, the time of a step or else what is sent, no recomputation."""
    most = row.most
    offloaded = most.host.optimizer + most.nvme.optimizer > 0
    sent = (sum(c.between(nodes) for c in row.sent), sum(c.inside(nodes) for c in row.sent))
    time = row.time.expected if row.time else 0.0
    return (offloaded, round(time, 6), FORMS.index(row.checkpointing), *sent, most.device.total)


def _reason(best: Row, count: str, memory: int) -> str:
    room = f"with {show_bytes(best.most.device.total)} of {show_bytes(memory)} per device"
    if best.time is not None:
        return (
            f"of what fits ({count}), without offload where that is possible, its step is the shortest, about "
            f"{show_seconds(best.time.expected)}, {room}"
        )
    return (
        f"of what fits ({count}) it keeps state on the device and computes nothing twice as far as that is possible, "
        f"and then sends least, {room}"
    )


def recommended_yaml(row: Row, nodes: Nodes, precision: str | None) -> str:
    """The trainer's part of a configuration that runs ``row``."""
    content = yaml.safe_load(preset_yaml(row.name))
    if row.checkpointing is not None:
        content["trainer"]["strategy"]["init_args"]["activation_checkpointing"] = row.checkpointing
    content["trainer"] |= {"num_nodes": nodes.nodes, "devices": nodes.devices}
    if precision is not None:
        content["trainer"]["precision"] = precision
    return yaml.safe_dump(content, sort_keys=False).rstrip()
