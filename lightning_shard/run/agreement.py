"""What the ranks compare once the module has made it, beside the settings that they compare when they meet."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.optim import Optimizer

from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks


def same_on_all_ranks(optimizers: list[Optimizer]) -> list[Optimizer]:
    """``optimizers``, whose classes, groups and hyperparameters all ranks must have made the same. All ranks call it.

    A ConfigurationError on every rank names what differs.
    """
    own = _hyperparameters(optimizers)
    ranks = Ranks.of()
    digests = ranks.gather(hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()[:16])
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return optimizers
    first, differing = ranks.broadcast(own), ranks.broadcast(own, other)
    names = [name for name in {**first, **differing} if first.get(name) != differing.get(name)]
    found = "; ".join(f"{n} is {first.get(n, 'not there')} and {differing.get(n, 'not there')}" for n in names[:4])
    raise ConfigurationError(
        f"configure_optimizers makes other optimizers on rank {other} than on rank 0: {found}. Ranks step shards of "
        "the same parameters: derive hyperparameters from what is the same on every rank."
    )


def _hyperparameters(optimizers: list[Optimizer]) -> dict[str, str]:
    found = {"the number of optimizers": str(len(optimizers))}
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer {index}"
        found[f"the class of {name}"] = type(optimizer).__qualname__
        for number, group in enumerate(optimizer.param_groups):
            own = f"of group {number} of {name}"
            found[f"the number of parameters {own}"] = str(len(group["params"]))
            found |= {f"{key} {own}": _text(value) for key, value in group.items() if key != "params"}
    return found


def _text(value: Any) -> str:
    # What prints an address differs on every rank.
    plain = isinstance(value, int | float | str | bool | tuple | list | type(None))
    return repr(value) if plain else type(value).__qualname__
