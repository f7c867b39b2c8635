"""Where parameters lie in the flat partitions that ZeRO's files hold, and whole tensors put together from them.

As DeepSpeed's own ``deepspeed/utils/zero_to_fp32.py`` has it. Stages 1 and 2 cut a group of parameters, laid out one
after the other, into one stretch per rank; stage 3 cuts every parameter on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.archive import ArchivedTensor
from lightning_shard.checkpoint.stored import StoredTensor
from lightning_shard.errors import CheckpointCorruptError


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter lies: in ``group`` of the flat lists, from ``offset`` on."""

    group: int
    offset: int
    shape: tuple[int, ...]


def places_of(shapes: Sequence[Mapping[str, Any]], paddings: Any, world: int) -> dict[str, Place]:
    """Name to place. ``world``: of stage 3, where every parameter is cut over the ranks on its own; else 0."""
    found: dict[str, Place] = {}
    for group, named in enumerate(shapes):
        offset = 0
        for position, (name, size) in enumerate(named.items()):
            shape = tuple(size)
            found[name] = Place(group=group, offset=offset, shape=shape)
            numel = torch.Size(shape).numel()
            offset += -(-numel // world) if world else numel
            if paddings is not None and not world:
                offset += paddings[group][position]
    return found


def flat_tensor(parts: Sequence[ArchivedTensor], place: Place, stage: int) -> StoredTensor:
    """The parameter at ``place``, or a slot that lies like it; ``parts`` has each rank's flat tensor of its group."""
    numel = torch.Size(place.shape).numel()
    if stage == 3:
        share = -(-numel // len(parts))
        ranges = [(part, place.offset, place.offset + share) for part in parts]
    else:
        # Each rank has a stretch of the group as long as rank 0's; padding at the group's end is not stored.
        size, end = parts[0].shape[0], place.offset + numel
        ranges = [
            (part, max(place.offset - rank * size, 0), min(end - rank * size, size))
            for rank, part in enumerate(parts)
            if place.offset < (rank + 1) * size and end > rank * size
        ]
    return _joined(ranges, place.shape)


def frozen_tensor(fragments: Sequence[ArchivedTensor], shape: tuple[int, ...]) -> StoredTensor:
    """A frozen parameter of stage 3, of which each rank has an equal share, padded at the end."""
    return _joined([(fragment, 0, fragment.shape[0]) for fragment in fragments], shape)


def _joined(ranges: Sequence[tuple[ArchivedTensor, int, int]], shape: tuple[int, ...]) -> StoredTensor:
    """The values of 1-D ``ranges`` (tensor, first, last) one after the other, cut to ``shape``."""
    numel = torch.Size(shape).numel()
    if sum(last - first for _, first, last in ranges) < numel or any(last > t.shape[0] for t, _, last in ranges):
        raise CheckpointCorruptError(f"the ranks' partitions are too short for a parameter of shape {shape}")
    dtype = ranges[0][0].dtype if ranges else torch.float32

    def read() -> Tensor:
        whole = torch.empty(numel, dtype=dtype)
        filled = 0
        for tensor, first, last in ranges:
            count = min(last - first, numel - filled)
            whole[filled : filled + count] = tensor.elements(first, first + count)
            filled += count
        return whole.view(shape)

    return StoredTensor(shape=shape, dtype=dtype, read=read)
