"""The data of a run: the same loaders on all ranks, evaluation of uneven shares, and where a resumed run goes on.

For that each rank saves its generators, metrics, logged values of the epoch and dataloaders' positions; they are given
back at the latest moment at which nothing else draws from or resets them.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard._lightning import Replacements, loaders, loops, results
from lightning_shard._lightning.callbacks import go_on_in_mid_epoch, thaw_again, thawed
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES, RUN_STATE
from lightning_shard.checkpoint.schedules import SCHEDULES, kinds_of
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.resume import rng
from lightning_shard.resume.metrics import load_metric_states, metric_states
from lightning_shard.resume.wrap import agreeing, check_lengths, check_some, order_warning
from lightning_shard.run.buffers import OWN, own_buffers, restore_buffers
from lightning_shard.text import listed

Stage = Literal["training", "validation", "predict"]


def checked(loader: Any, stage: Stage) -> Any:
    """``loader``, which has the same number of batches on all ranks (else DataError), or ends on all together."""
    length, what = sized_len(loader), f"{stage} dataloader"
    if stage == "predict" and length is not None:
        check_some(length, what=what)
    else:
        check_lengths(length, what=what)
    return agreeing(loader, what=what) if length is None else loader


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
        self._made: int | None = None  # The epoch in which the training loaders were made.
        self._trained = False  # In this run.
        self._forget()

    def end_of_run(self) -> None:
        """Go on with nothing where a run had no batch left to train, or failed ahead of it. What was loaded after its
        training is the next fit's, as by a learning rate finder.
        """
        if not self._trained:
            self._forget()
        self._trained = False

    def _forget(self) -> None:
        self._resumed: Mapping[str, Any] | None = None

    def process(self, loader: Any, trainer: Trainer, coordinates: tuple[int, int]) -> Any:
        """Make a training loader, which Lightning gives on all ranks, resumable, and check it for ``coordinates``."""
        loaders.keep_batches(loader)
        if trainer.training:
            self._made = trainer.current_epoch
            loader = loaders.prepare_loader(trainer, loader, *coordinates, sample_seeds=self._sample_seeds)
            saved = self._resumed is not None
            if (saved or loops.resumes_in_mid_epoch(trainer)) and (warning := order_warning(loader, saved=saved)):
                rank_zero_warn(warning)
        stage: Stage = "predict" if trainer.predicting else "training" if trainer.training else "validation"
        return checked(loader, stage)

    def saved(
        self, trainer: Trainer, checkpoint: Mapping[str, Any], before_validation: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """``checkpoint`` with the run's state, and what this rank alone goes on with; of weights only none.
        ``before_validation``: what `changed_by_validation` gave then, which a save in one keeps. Where a resumed run
        has not begun to train, what it was resumed from is saved again.
        """
        if OPTIMIZER_STATES not in checkpoint:
            return dict(checkpoint), None
        within = _within_step(trainer)
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        if batches.ready > batches.processed:
            rank_zero_warn(
                "A checkpoint is saved in the middle of a training batch: a run that resumes from it goes on with the"
                " next one. Save in on_train_batch_end, or later, to lose none."
            )
        counters, follows = loops.saved_after_batch(trainer, checkpoint["loops"])
        own = {
            **_changed_by_evaluation(trainer),
            "logged": results.training_results_state(trainer, validates=follows == "validation"),
            "loaders": loaders.loader_states(trainer, counters),
            **within,
        }
        own |= before_validation if loops.in_validation(trainer) else {}
        if (resumed := self._resumed) is not None:
            ranks = resumed["ranks"]
            if len(ranks) == trainer.world_size:
                kept = {name: value for name, value in resumed.items() if name != "ranks"}
                return {**checkpoint, "loops": counters, RUN_STATE: kept, **thawed(trainer)}, ranks[trainer.global_rank]
            rank_zero_warn(
                "A checkpoint is saved in on_train_start of a resumed run, to which its random numbers and metrics are "
                "not given back yet: it lacks them. Save after a step."
            )
        kept = {"seed": torch.initial_seed(), "epoch_ends": follows == "end of the epoch", "batch": _factors(trainer)}
        made = self._made if vars(trainer)["reload_dataloaders_every_n_epochs"] else None
        kept |= {"reloaded": made, "stop": loops.stop_is_due(trainer)}
        kept[SCHEDULES] = kinds_of(trainer.strategy.lr_scheduler_configs)
        kept["frozen"] = [name for name, frozen in _frozen(trainer).items() if frozen]
        return {**checkpoint, "loops": counters, RUN_STATE: kept, **thawed(trainer)}, own

    def loaded(self, checkpoint: dict[str, Any], rank: int) -> None:
        """Put this rank's part where Lightning takes the loaders' state from."""
        if RUN_STATE in checkpoint:
            ranks = checkpoint[RUN_STATE]["ranks"]
            # The positions are common to all ranks, also to one that did not exist then.
            if loaders := ranks[rank if rank < len(ranks) else 0]["loaders"]:
                checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders

    def resume(self, checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
        """Remember what a fit goes on with, ahead of its tensors, and thaw what the saved run had thawed."""
        self._resumed = checkpoint.get(RUN_STATE)
        thaw_again(trainer, checkpoint)

    def loops_loaded(self, replacements: Replacements, trainer: Trainer) -> None:
        """The loops' state was loaded: give loaders theirs, let an epoch end that ends next, settle a validation."""
        if not trainer.fit_loop.restarting:  # a checkpoint that code loads in mid-fit, without the loops
            self._forget()
            return
        loaders.forget_loaders(trainer)
        if self._resumed is not None and self._resumed.get("epoch_ends"):
            loops.end_epoch(replacements, trainer)
        loops.settle_validation(replacements, trainer)

    def start_of_training(self, trainer: Trainer) -> None:
        """Go on with what a resumed run had, after all that draws from or resets it. All ranks call it."""
        resumed, module = self._resumed, trainer.lightning_module
        go_on_in_mid_epoch(trainer)
        self._forget()
        self._trained = True
        if resumed is not None:
            other = other_batch(resumed.get("batch"), _factors(trainer))
            frozen = other_frozen(resumed.get("frozen"), _frozen(trainer))
            for warning in filter(None, (other, frozen)):
                rank_zero_warn(warning)
        # Ahead of what says that the loops do not resume any more.
        made = (resumed or {}).get("reloaded")
        self._made = self._made if made is None else made
        loaders.recount_batches(trainer, made)
        loops.count_begun_epoch(trainer)
        if resumed is not None:
            trainer.should_stop = trainer.should_stop or bool(resumed.get("stop"))
            _warn_within_step(trainer, resumed["ranks"][0])
            ranks, rank, size = resumed["ranks"], trainer.global_rank, trainer.world_size
            # At another number of ranks metrics are merged, and ranks that did not exist get generators of their own.
            load_metric_states(trainer.lightning_module, [r["metrics"] for r in ranks], rank=rank, world_size=size)
            logged = [r["logged"] for r in ranks]
            results.restore_training_results(trainer, logged, rank=rank)
            own = ranks[rank if rank < len(ranks) else 0]
            if len(ranks) == size:
                restore_buffers(module, own.get(OWN, {}))
            if begin := loaders.unsaved_generators(trainer):
                rank_zero_warn(
                    f"These random number generators are in no checkpoint and begin anew: {', '.join(begin)}. Save them"
                    " in on_save_checkpoint, or a callback's or datamodule's state_dict, to go on where they were."
                )
            if rank < len(ranks):
                rng.set_rng_state(ranks[rank]["rng"])
            else:
                rng.seed_rng(rng.derived_rng_seed(int(resumed["seed"]), rank, trainer.global_step))


_RULE = "{} ranks x batch size {} x accumulate_grad_batches {}"


def _factors(trainer: Trainer, unknown: int | None = None) -> list[int]:
    """As in `_RULE`; where only a hook knows the batch size it is ``unknown``, or None are given."""
    micro = loaders.train_batch_size(trainer) or unknown
    return [] if micro is None else [trainer.world_size, micro, trainer.accumulate_grad_batches]


def other_batch(saved: list[int] | None, now: list[int]) -> str | None:
    """What to say of steps that take another number of samples than those before."""
    if not saved or not now or prod(saved) == prod(now):
        return None
    keeps, rest = divmod(prod(saved), now[0] * now[1])
    return (
        f"A step took {prod(saved)} samples before the checkpoint ({_RULE.format(*saved)}) and takes {prod(now)} now "
        f"({_RULE.format(*now)}), which the learning rate may not be meant for. "
        + (f"accumulate_grad_batches: {keeps} keeps it." if not rest else "No accumulate_grad_batches keeps it.")
    )


def _frozen(trainer: Trainer) -> dict[str, bool]:
    return {name: not parameter.requires_grad for name, parameter in trainer.lightning_module.named_parameters()}


def other_frozen(saved: list[str] | None, frozen: Mapping[str, bool]) -> str | None:
    """What to say of parameters, by name whether ``frozen``, that were not so where the ``saved`` ones were frozen."""
    other = [name for name, here in frozen.items() if here != (name in saved)] if saved is not None else []
    if not other:
        return None
    return (
        f"Frozen when the checkpoint was saved and trained here, or the other way round: {listed(other)}. What a hook "
        "freezes or thaws is not done again on resuming, but by callbacks of BaseFinetuning: do it in on_train_start."
    )


def changed_by_validation(trainer: Trainer) -> dict[str, Any]:
    """The parts of this rank's state that a validation may change, copied: a save in it goes back to its beginning."""
    return {**_changed_by_evaluation(trainer), OWN: own_buffers(trainer.lightning_module)}


def _changed_by_evaluation(trainer: Trainer) -> dict[str, Any]:
    return {"rng": rng.rng_state(), "metrics": metric_states(trainer.lightning_module)}


# An optimizer step of several batches, whose gradients no checkpoint has.

_WITHIN = "accumulation"  # Where a rank's own state says how many such batches it was saved after.


def _within_step(trainer: Trainer) -> dict[str, Any]:
    """What a rank's own state says of batches whose gradients a step adds up, with a warning, as in a fit that was told
    to stop there. CheckpointError, on every rank: the fit goes on.
    """
    plugin: Any = trainer.precision_plugin
    if not trainer.lightning_module.automatic_optimization and plugin.backward_pending:
        rank_zero_warn(
            "This checkpoint is saved after a manual_backward that no optimizer step has followed. Its gradients are "
            "not saved, and the step after resuming lacks them. Save after a step."
        )
    if not (batches := loops.accumulated_batches(trainer)):
        return {}
    within = f"{batches} of the {trainer.accumulate_grad_batches} batches of one step"
    if trainer.state.status == TrainerStatus.RUNNING and not trainer.should_stop:
        raise CheckpointError(
            f"save_checkpoint is called after {within}, whose gradients no checkpoint has. Save in on_train_batch_end "
            "of the last of them, by a ModelCheckpoint, which waits for that, or with weights_only=True."
        )
    rank_zero_warn(f"This checkpoint is saved after {within}: a run that resumes from it leaves these batches out.")
    return {_WITHIN: {"batches": batches}}


def _warn_within_step(trainer: Trainer, own: Mapping[str, Any]) -> None:
    """Say where a fit goes on among the batches of one step; ``own``: a rank's state in the checkpoint."""
    here = loops.accumulated_batches(trainer) if trainer.fit_loop.restarted_mid_epoch else 0
    if batches := own.get(_WITHIN, {}).get("batches", here):
        rank_zero_warn(
            f"The fit goes on after {batches} batches of one step, whose gradients are not read from checkpoints: the "
            "next step leaves them out. Resume from a checkpoint that was saved after a step, with as many batches for "
            "a step as before."
        )
