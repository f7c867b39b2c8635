"""The data of a run: the same loaders on all ranks, evaluation of uneven shares, and where a resumed run goes on.

Beyond parameters, optimizers and Lightning's own checkpoint a run needs to go on bitwise, per rank: the random number
generators, the states of metrics and of values logged so far in the epoch, and the positions of the dataloaders. They
are saved by each rank for itself, and given back at the latest moment at which nothing else draws from or resets them.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard._lightning import progress, results
from lightning_shard._lightning.callbacks import thaw_again, thawed
from lightning_shard._lightning.loaders import (
    loader_states,
    prepare_loader,
    recount_batches,
    reload_as_before,
    reload_epoch,
    train_batch_size,
)
from lightning_shard._lightning.replaced import Replacements
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES, RUN_STATE
from lightning_shard.ranks import Ranks
from lightning_shard.resume.lengths import agreeing, check_lengths, check_some
from lightning_shard.resume.metrics import load_metric_states, metric_states
from lightning_shard.resume.rng import (
    derived_rng_seed,
    load_module_rng_states,
    module_rng_states,
    rng_state,
    seed_rng,
    set_rng_state,
)
from lightning_shard.resume.wrap import order_warning
from lightning_shard.run import accumulation
from lightning_shard.run.checkpoints import Checkpoints

Stage = Literal["training", "validation", "predict"]


@contextmanager
def evaluating() -> Generator[None, None, None]:
    """No gradients, and no inference mode, whatever the loop entered: leaving inference mode turns gradients on."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def checked(loader: Any, stage: Stage) -> Any:
    """``loader``, once all ranks have the same number of batches; without a length it ends on all ranks together.

    All ranks call it for each loader. DataError on every rank: sized loaders of different lengths.
    """
    length = sized_len(loader)
    what = f"{stage} dataloader"
    if length is None:
        check_lengths(None, what=what)
        return agreeing(loader, what=what)
    check = check_some if stage == "predict" else check_lengths
    check(length, what=what)
    return loader


class Predictions:
    """Predictions on ranks that have different numbers of batches: no sample is repeated to even them out."""

    def __init__(self, own: int | None = None) -> None:
        """Find out how many batches the others have; ``own`` None: forward needs no other rank. All ranks call it."""
        self._left = own or 0
        self._idle = 0 if own is None else max(Ranks.of().gather(own)) - own

    def step(self, predict: Callable[[], Any]) -> Any:
        """``predict()``, which after the last batch is repeated, unused, as often as other ranks' gathers need it."""
        output = predict()
        self._left -= 1
        if self._left == 0:
            for _ in range(self._idle):
                predict()
        return output


class Data:
    """The loaders of a run and the state that a checkpoint keeps of them."""

    def __init__(self, *, sample_seeds: bool) -> None:
        """Nothing was resumed yet; ``sample_seeds``: training samples' random numbers are seeded by epoch and index."""
        self._sample_seeds = sample_seeds
        self._resumed: Mapping[str, Any] | None = None

    def process(self, loader: Any, trainer: Trainer, coordinates: tuple[int, int]) -> Any:
        """Make the training loader resumable, and see that all ranks have the same number of batches, as `checked`.

        Lightning calls it on all ranks for each loader, after it has put a distributed sampler in. ``coordinates``:
        number of data-parallel ranks, and this one's index.
        """
        if trainer.training:
            world_size, rank = coordinates
            ranks = {"world_size": world_size, "rank": rank}
            loader = prepare_loader(trainer, loader, **ranks, sample_seeds=self._sample_seeds)
            if self._resumed is not None and (warning := order_warning(loader)) is not None:
                rank_zero_warn(warning)
        stage: Stage = "predict" if trainer.predicting else "training" if trainer.training else "validation"
        return checked(loader, stage)

    def saved(
        self, trainer: Trainer, checkpoint: Mapping[str, Any], before_validation: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """``checkpoint`` with the run's state, and what this rank alone goes on with; of weights only there is none.

        ``before_validation``: `changed_by_evaluation` as it was then, which a save in one keeps.
        """
        if OPTIMIZER_STATES not in checkpoint:
            return dict(checkpoint), None
        if progress.in_batch(trainer):
            rank_zero_warn(
                "A checkpoint is saved in the middle of a training batch: a run that resumes from it goes on with the"
                " next one. Save in on_train_batch_end, or later, to lose none."
            )
        loops, epoch_ends = progress.saved_after_batch(trainer, checkpoint["loops"])
        own = {
            **changed_by_evaluation(trainer),
            "logged": results.training_results_state(trainer),
            "loaders": loader_states(trainer, loops),
            **(before_validation if progress.in_validation(trainer) else {}),
            **accumulation.state(trainer),
        }
        kept = {"seed": torch.initial_seed(), "epoch_ends": epoch_ends, "batch": _factors(trainer)}
        kept["reloaded"] = reload_epoch(trainer)
        return {**checkpoint, "loops": loops, RUN_STATE: kept, **thawed(trainer)}, own

    def loaded(self, checkpoint: dict[str, Any], rank: int) -> None:
        """Put this rank's part where Lightning takes the loaders' state from."""
        if RUN_STATE in checkpoint:
            ranks = checkpoint[RUN_STATE]["ranks"]
            # The positions are common to all ranks, also to one that did not exist then.
            if loaders := ranks[rank if rank < len(ranks) else 0]["loaders"]:
                checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders

    def resume(self, checkpoint: Mapping[str, Any], trainer: Trainer, *, thaws: bool) -> None:
        """Remember what a fit goes on with, ahead of its tensors. ``thaws``: in what the saved run had thawed."""
        self._resumed = checkpoint.get(RUN_STATE)
        if thaws:
            thaw_again(trainer, checkpoint)

    def loops_loaded(self, replacements: Replacements, trainer: Trainer) -> None:
        """The loops' state was loaded: let an epoch end whose end comes next, and settle a validation."""
        if self._resumed is not None and self._resumed.get("epoch_ends"):
            progress.end_epoch(replacements, trainer)
        progress.settle_validation(replacements, trainer)

    def start_of_training(self, replacements: Replacements, trainer: Trainer, checkpoints: Checkpoints) -> None:
        """Go on with the generators, metrics and batches of a resumed run, after all that draws from or resets them.

        ``checkpoints`` have the gradients of a step that goes on. All ranks call it.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is not None and (warning := other_batch(resumed.get("batch"), _factors(trainer))) is not None:
            rank_zero_warn(warning)
        recount_batches(trainer)  # ahead of what says that the loops do not resume any more
        if resumed is not None:
            reload_as_before(trainer, resumed.get("reloaded"))
            accumulation.resume(trainer, resumed["ranks"], checkpoints)
            ranks, rank, size = resumed["ranks"], trainer.global_rank, trainer.world_size
            # At another number of ranks metrics are merged, and ranks that did not exist get generators of their own.
            load_metric_states(trainer.lightning_module, [r["metrics"] for r in ranks], rank=rank, world_size=size)
            logged = [r["logged"] for r in ranks]
            results.restore_training_results(replacements, trainer, logged, rank=rank, world_size=size)
            lost = load_module_rng_states(
                trainer.lightning_module, ranks[rank if rank < len(ranks) else 0].get("generators", {})
            )
            if lost:
                rank_zero_warn(
                    f"Generators of the checkpoint that the module does not have any more: {', '.join(lost)}."
                )
            if rank < len(ranks):
                set_rng_state(ranks[rank]["rng"])
            else:
                seed_rng(derived_rng_seed(int(resumed["seed"]), rank, trainer.global_step))


def _factors(trainer: Trainer) -> list[int]:
    """Ranks, samples of a micro-batch and micro-batches of a step; empty where the loader has no batch size."""
    micro = train_batch_size(trainer)
    return [] if micro is None else [trainer.world_size, micro, trainer.accumulate_grad_batches]


def other_batch(saved: list[int] | None, now: list[int]) -> str | None:
    """What to say of steps that take another number of samples than those before."""
    if not saved or not now or prod(saved) == prod(now):
        return None
    factors = "{} ranks x batch size {} x accumulate_grad_batches {}"
    keeps, rest = divmod(prod(saved), now[0] * now[1])
    return (
        f"A step took {prod(saved)} samples before the checkpoint ({factors.format(*saved)}) and takes {prod(now)} now "
        f"({factors.format(*now)}), which the learning rate may not be meant for. "
        + (f"accumulate_grad_batches: {keeps} keeps it." if not rest else "No accumulate_grad_batches keeps it.")
    )


def changed_by_evaluation(trainer: Trainer) -> dict[str, Any]:
    """The parts of this rank's state that validation changes, copied."""
    module = trainer.lightning_module
    return {"rng": rng_state(), "generators": module_rng_states(module), "metrics": metric_states(module)}
