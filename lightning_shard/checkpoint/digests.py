"""Digests of tensors, the same whichever way they are sharded: of a frozen base that is not in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.plan import Plans, live_values
from lightning_shard.ranks import Ranks

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS = 1 << 20  # in memory as int64 at a time


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Name of each tensor to its digest, on every rank. All ranks call it, with what each has of the tensors.

    A digest has shape, dtype, and 64 bits of a sum over all elements of their bits times a number made from their
    position. Each element is read by one of the ranks that have it. It tells other weights, not an attack.
    """
    ranks, plans = Ranks.of(), Plans()
    ranks.agree("looking at frozen parameters", lambda: plans.still_holds(tensors, {}))
    mine, values = plans.agreed(ranks, still_holds=False).mine, live_values(tensors)

    def own() -> dict[str, int]:
        sums = dict.fromkeys(tensors, 0)
        for index in mine:
            sums[index.fqn] += _sum(values(index), tuple(index.offset or ()), tuple(tensors[index.fqn].shape))
        return sums

    def total(parts: list[dict[str, int]]) -> list[dict[str, str]]:
        known = {
            name: f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')} "
            f"{sum(part[name] for part in parts) % 2**64:016x}"
            for name, tensor in tensors.items()
        }
        return [known] * ranks.size

    return ranks.exchange("reading frozen parameters", own, total)


@torch.no_grad()
def _sum(box: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The part of a tensor's sum that a box at ``offsets`` has."""
    if box.is_complex():
        box, offsets, shape = torch.view_as_real(box.resolve_conj()), (*offsets, 0), (*shape, 2)
    bits = (box.reshape(1) if box.ndim == 0 else box.contiguous()).view(_INTEGERS[box.element_size()])
    offsets, shape = offsets or (0,), shape or (1,)
    rows = max(1, _ELEMENTS // max(1, bits[:1].numel()))
    found = 0
    for first in range(0, len(bits), rows):
        part = bits[first : first + rows].to(torch.int64)
        position = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape):
            start = offsets[dim] + (first if dim == 0 else 0)
            along = torch.arange(start, start + size, dtype=torch.int64, device=part.device)
            position = position.unsqueeze(-1) * shape[dim] + along
        position = (position + 1) * -0x61C8864680B583EB  # 2^64 over the golden ratio, then mixed as by splitmix64
        position = (position ^ (position >> 31)) * -0x6B2FB644ECCEEE15
        found += int((part * (position ^ (position >> 29))).sum())
    return found
