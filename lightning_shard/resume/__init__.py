"""Bitwise resume of data order and random numbers; nothing here imports Lightning.

- :func:`resumable` makes a stock DataLoader carry its position, at another world size too.
- :func:`check_lengths`, :func:`agreed` and :func:`agreeing` end all ranks together where their data is uneven.
- :func:`rng_state`, :func:`set_rng_state` and :func:`derived_rng_seed` are the random numbers of a rank.
- :func:`states_of_rank` picks a rank's own of what differs between ranks.
"""

from __future__ import annotations

from lightning_shard.resume.iterable import StatefulIterableLoader
from lightning_shard.resume.lengths import agreed, agreeing, check_lengths, check_some
from lightning_shard.resume.loader import ResumableLoader
from lightning_shard.resume.order import global_order, rank_share, rescale_batches, share_size
from lightning_shard.resume.rng import (
    derived_rng_seed,
    rng_state,
    seed_rng,
    set_rng_state,
    states_of_rank,
)
from lightning_shard.resume.wrap import order_warning, resumable

__all__ = [
    "ResumableLoader",
    "StatefulIterableLoader",
    "agreed",
    "agreeing",
    "check_lengths",
    "check_some",
    "derived_rng_seed",
    "global_order",
    "order_warning",
    "rank_share",
    "rescale_batches",
    "resumable",
    "rng_state",
    "seed_rng",
    "set_rng_state",
    "share_size",
    "states_of_rank",
]
