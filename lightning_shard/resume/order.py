"""Arithmetic of sample orders and world sizes: plain functions over lists of indices.

A *position* is a count of samples in the epoch's global order, the one that a single process would see. Rank r of
w processes sees every w-th sample from its own on, as ``DistributedSampler`` does, so that k samples on each rank
are the first k * w of the global order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DistributedSampler


def share_size(length: int, start: int, world_size: int, *, drop_last: bool) -> int:
    """Samples that each rank gets of what is left of `length` samples from `start` on."""
    left = max(0, length - start)
    return left // world_size if drop_last else -(-left // world_size)


def rank_share(order: Sequence[int], start: int, rank: int, world_size: int, *, drop_last: bool) -> list[int]:
    """The samples of ``order[start:]`` for `rank`; with ``start=0`` exactly DistributedSampler's.

    Every rank gets equally many: the end is padded with the head of the whole `order` (repeated if it is shorter
    than the padding), or with `drop_last` cut.
    """
    total = share_size(len(order), start, world_size, drop_last=drop_last) * world_size
    rest = list(order[start : start + total])
    missing = total - len(rest)
    if missing:
        rest += (list(order) * -(-missing // len(order)))[:missing]
    return rest[rank::world_size]


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches that BatchSampler makes of `samples`."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def global_order(sampler: DistributedSampler[Any]) -> list[int]:
    """The epoch's order of all ranks together, without padding or cutting.

    Asks the sampler itself as the only replica of a world of one; so it holds for subclasses that keep to the
    attributes of DistributedSampler, such as wrappers over another sampler.
    """
    single = copy.copy(sampler)
    single.num_replicas, single.rank = 1, 0
    # Typed through the dataset protocol, which has no length there.
    single.num_samples = single.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(single)
