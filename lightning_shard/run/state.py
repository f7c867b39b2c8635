"""What a run needs to go on bitwise, beyond parameters, optimizers and Lightning's own checkpoint.

Per rank: the random number generators, the states of metrics and of values logged so far in the epoch, and the
positions of the dataloaders. One process' share of it is gathered into the checkpoint, and given back when the run
goes on, at the latest moment at which nothing else draws from or resets it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_shard import _lightning
from lightning_shard.ranks import Ranks
from lightning_shard.resume.metrics import load_metric_states, metric_states
from lightning_shard.resume.rng import derived_rng_seed, rng_state, seed_rng, set_rng_state, states_of_rank


def before_validation(trainer: Trainer) -> dict[str, Any]:
    """The parts of this rank's state that validation changes, copied."""
    return {"rng": rng_state(), "metrics": metric_states(trainer.lightning_module)}


def collect(
    trainer: Trainer, loops: Mapping[str, Any], rewound: Mapping[str, Any], *, epoch_ends: bool
) -> dict[str, Any]:
    """The run's state, on rank 0 that of all ranks, in types that load with ``weights_only=True``. All ranks call it.

    ``loops``: the loops' part of the checkpoint that is being written. ``rewound``: parts to be saved as they were
    before, such as `before_validation`'s. ``epoch_ends``: the end of the epoch comes next.
    """
    own = {
        "rng": rng_state(),
        "metrics": metric_states(trainer.lightning_module),
        "logged": _lightning.training_results_state(trainer),
        "loaders": loops["fit_loop"]["state_dict"].get("combined_loader", []),
        **rewound,
    }
    ranks, states = Ranks.of(), [own]

    def keep(gathered: list[dict[str, Any]]) -> list[None]:
        states[:] = gathered
        return [None] * ranks.size

    ranks.exchange("collecting the state of the ranks", lambda: own, keep)
    return {"seed": torch.initial_seed(), "epoch_ends": epoch_ends, "ranks": states}


def place_loaders(checkpoint: dict[str, Any], run: Mapping[str, Any], rank: int) -> None:
    """Put this rank's dataloader states, not rank 0's, where Lightning takes them from."""
    loaders = states_of_rank(run["ranks"], rank)["loaders"]
    if loaders:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders


def restore(replacements: _lightning.Replacements, trainer: Trainer, run: Mapping[str, Any]) -> None:
    """Give the state back to this rank, right before training goes on. No communication.

    At another number of ranks metrics are merged, and ranks that did not exist get generators of their own.
    """
    ranks, rank, size = run["ranks"], trainer.global_rank, trainer.world_size
    load_metric_states(trainer.lightning_module, [r["metrics"] for r in ranks], rank=rank, world_size=size)
    logged = [r["logged"] for r in ranks]
    _lightning.restore_training_results(replacements, trainer, logged, rank=rank, world_size=size)
    if rank < len(ranks):
        set_rng_state(ranks[rank]["rng"])
    else:
        seed_rng(derived_rng_seed(int(run["seed"]), rank, trainer.global_step))
