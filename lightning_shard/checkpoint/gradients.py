"""Gradients that a step has accumulated so far, in a checkpoint: averaged over the ranks, or every rank's own in full
where they are averaged at the step's end. Where a checkpoint is read as it was written, they are read back bit by bit;
else a rank's own become averages, and averages every rank's own, which the ranks' average gives back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.tensor_files import read_tensors
from lightning_shard.checkpoint.load import OpenCheckpoint
from lightning_shard.errors import CheckpointCorruptError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import Accumulated
from lightning_shard.tensors.names import fqns


def keyed(gradients: Mapping[str, Accumulated]) -> dict[str, Any]:
    """Key of a checkpoint to tensor, of gradients by FQN on this rank."""
    keys = {True: layout.GRADIENT_PREFIX, False: f"{layout.RANK_GRADIENT_PREFIX}{Ranks.of().rank}."}
    return {keys[each.reduced] + fqn: each.tensor for fqn, each in gradients.items()}


def stored_gradients(keys: Collection[str]) -> dict[str, dict[int | None, str]]:
    """FQN to key by rank, None: averaged over the ranks; empty where a checkpoint has no gradients."""
    found: dict[str, dict[int | None, str]] = {}
    for key in keys:
        if key.startswith(layout.GRADIENT_PREFIX):
            found.setdefault(key.removeprefix(layout.GRADIENT_PREFIX), {})[None] = key
        elif key.startswith(layout.RANK_GRADIENT_PREFIX):
            rank, _, fqn = key.removeprefix(layout.RANK_GRADIENT_PREFIX).partition(".")
            if not fqn or not rank.isdecimal():
                raise CheckpointCorruptError(f"{key} is the gradient of no rank")
            found.setdefault(fqn, {})[int(rank)] = key
    return found


Begin = Callable[[Collection[str]], Mapping[str, Accumulated]]


def load_gradients(checkpoint: OpenCheckpoint, module: nn.Module, begin: Begin, *, factor: float) -> None:
    """Read a checkpoint's gradients, times ``factor``, into those that ``begin`` makes zeros of; those of what is not
    trained here are left out. All ranks call it. CheckpointCorruptError, on every rank.
    """
    ranks, path, writers = Ranks.of(), checkpoint.path, checkpoint.manifest.facts.world_size
    found = ranks.agree(f"opening {path}", lambda: stored_gradients(checkpoint.manifest.tensors))
    names = fqns(module)
    stored = {own: keys for fqn, keys in found.items() if (own := names.aliases.get(fqn, fqn)) in names.tensors}
    live = begin(stored.keys())

    def read() -> None:
        for name, keys in stored.items():
            if name not in live:
                continue
            if None in keys or live[name].reduced or writers != ranks.size:
                # The average of what some ranks have, where the others have used nothing.
                share = 1.0 if None in keys else 1 / writers
                _read_sum(checkpoint, live[name], list(keys.values()), share * factor)
            else:
                _read_sum(checkpoint, live[name], [key for rank, key in keys.items() if rank == ranks.rank], factor)

    ranks.agree(f"reading {path}", read)


@torch.no_grad()
def _read_sum(checkpoint: OpenCheckpoint, live: Accumulated, keys: Sequence[str], factor: float) -> None:
    """Fill ``live`` with ``factor`` times the sum of stored tensors, which is taken in fp32."""
    sums: list[Tensor] = []
    for key in keys:
        read_tensors(checkpoint.directory, checkpoint.metadata, [(key, live.tensor)])
        here = [part.to(torch.float32, copy=True) for part in live.parts] if len(keys) > 1 or factor != 1 else []
        sums = [one.add_(other) for one, other in zip(sums, here, strict=True)] if sums else here
    for part, total in zip(live.parts, sums, strict=bool(sums)):
        part.copy_(total.mul_(factor))
