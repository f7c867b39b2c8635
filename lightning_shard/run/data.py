"""The data of a run: the same loaders on all ranks, evaluation of uneven shares, and the position on resume.

Each rank saves its generators, metrics, logged values of the epoch and loader positions. They are restored as late as
possible, after every other draw or reset.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard._lightning import Replacements, loaders, loops, results
from lightning_shard._lightning.callbacks import apply_accumulation_schedule, restore_trainable, trainable_state
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES, RUN_STATE
from lightning_shard.checkpoint.schedules import SCHEDULES, kinds_of
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.resume import rng
from lightning_shard.resume.metrics import load_metric_states, metric_states
from lightning_shard.resume.wrap import check_lengths, check_some, order_warning, stop_together_loader
from lightning_shard.tensors.names import persistent_buffers
from lightning_shard.text import listed

Stage = Literal["training", "validation", "predict"]

OWN_BUFFERS = "buffers"
"""Key of a rank's persistent buffers in its own state, as they were before a validation that runs again."""


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the host of the persistent buffers of ``module``, by key."""
    return {key: buffer.detach().to("cpu", copy=True) for key, buffer in persistent_buffers(module)}


@torch.no_grad()
def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write ``saved``, by key, into the persistent buffers of ``module``."""
    for key, buffer in persistent_buffers(module):
        if key in saved and saved[key].shape == buffer.shape:
            # `.data` keeps the version counter, so that a later backward pass does not find it changed.
            buffer.data.copy_(saved[key])


def check_loader(loader: Any, stage: Stage) -> Any:
    """Check that all ranks have as many batches (else DataError). Without a length it ends on all ranks together."""
    length, name = sized_len(loader), f"{stage} dataloader"
    if stage == "predict" and length is not None:
        check_some(length, name=name)
    else:
        check_lengths(length, name=name)
    return stop_together_loader(loader, name=name) if length is None else loader


class Predictions:
    """Predictions on ranks with different numbers of batches. No sample is repeated in the results."""

    def __init__(self, own: int | None = None) -> None:
        """Gather the numbers of batches. ``own`` None: forward needs no other rank. All ranks call it."""
        self._left = own or 0
        self._idle = 0 if own is None else max(Ranks.of().gather(own)) - own

    def run_step(self, predict: Callable[[], Any]) -> Any:
        """Run ``predict()``. After the last batch repeat it, unused, as often as gathers of other ranks need it."""
        output = predict()
        self._left -= 1
        if self._left == 0:
            for _ in range(self._idle):
                predict()
        return output


class Data:
    """Loaders of a run, and their state in checkpoints."""

    def __init__(self, *, sample_seeds: bool) -> None:
        """``sample_seeds``: seed the random numbers of training samples by epoch and index."""
        self._sample_seeds = sample_seeds
        self._made: int | None = None  # Epoch in which the training loaders were made.
        self._trained = False  # In this run.
        self._trains = False  # Now, from on_train_start to on_train_end.
        self._resumed: Mapping[str, Any] | None = None

    def end_of_run(self) -> None:
        """Forget an unused resumed state. One loaded after training, by a rate finder, stays for the next fit."""
        if not self._trained:
            self._resumed = None
        self._trained = self._trains = False

    def end_training(self) -> None:
        """End the time in which a checkpoint that is loaded is not one to resume from."""
        self._trains = False

    def prepare_loader(self, loader: Any, trainer: Trainer, coordinates: tuple[int, int]) -> Any:
        """Make a training loader resumable, and check any. ``coordinates``: data-parallel ranks, and this one."""
        loaders.keep_batch_size(loader)
        if trainer.training:
            self._made = trainer.current_epoch
            loader = loaders.prepare_loader(trainer, loader, *coordinates, sample_seeds=self._sample_seeds)
            saved = self._resumed is not None
            if (saved or loops.resumes_in_mid_epoch(trainer)) and (warning := order_warning(loader, saved=saved)):
                rank_zero_warn(warning)
        stage: Stage = "predict" if trainer.predicting else "training" if trainer.training else "validation"
        return check_loader(loader, stage)

    def checkpoint_state(
        self, trainer: Trainer, checkpoint: Mapping[str, Any], before_validation: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Add the run's state to ``checkpoint``, and return it with this rank's own state, which is None for weights
        only.

        ``before_validation``: result of `changed_by_validation`, for a save during a validation. If a resumed run has
        not begun to train, the state that it was resumed from is saved again.
        """
        if OPTIMIZER_STATES not in checkpoint:
            return dict(checkpoint), None
        within = _state_within_step(trainer)
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
        kept = {
            "seed": torch.initial_seed(),
            "epoch_ends": follows == "end of the epoch",
            "batch": _batch_factors(trainer),
            "reloaded": self._made if vars(trainer)["reload_dataloaders_every_n_epochs"] else None,
            "stop": loops.stop_is_due(trainer),
            SCHEDULES: kinds_of(trainer.strategy.lr_scheduler_configs),
            "frozen": [name for name, frozen in _frozen(trainer).items() if frozen],
        }
        if (resumed := self._resumed) is not None and len(resumed["ranks"]) == trainer.world_size:
            kept = {name: value for name, value in resumed.items() if name != "ranks"}
            own = resumed["ranks"][trainer.global_rank]
        elif resumed is not None:
            rank_zero_warn(
                "Checkpoint saved in on_train_start of a resumed run: its random numbers and metrics are not restored "
                "yet and will be missing. Save after a step."
            )
        return {**checkpoint, "loops": counters, RUN_STATE: kept, **trainable_state(trainer)}, own

    def give_loader_positions(self, checkpoint: dict[str, Any], rank: int) -> None:
        """Give Lightning this rank's loader positions from a checkpoint."""
        if RUN_STATE in checkpoint:
            ranks = checkpoint[RUN_STATE]["ranks"]
            # Positions are the same on all ranks, and hold for ranks that did not exist then.
            if loaders := ranks[rank if rank < len(ranks) else 0]["loaders"]:
                checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders

    def keep_resumed_state(self, checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
        """Keep a checkpoint's run state until training starts, and thaw parameters as the saved run had."""
        self._resumed = checkpoint.get(RUN_STATE)
        restore_trainable(trainer, checkpoint)

    def after_loops_loaded(self, replacements: Replacements, trainer: Trainer) -> None:
        """After the loops were loaded: give loaders their state, end a due epoch, settle a due validation."""
        if self._trains and not trainer.fit_loop.restarting:  # loaded by user code in mid-fit, without the loops
            self._resumed = None
            return
        loaders.forget_loaders(trainer)
        if self._resumed is not None and self._resumed.get("epoch_ends"):
            loops.end_epoch(replacements, trainer)
        loops.run_due_validation(replacements, trainer)

    def restore_resumed_state(self, trainer: Trainer) -> None:
        """Restore a resumed run's state, after everything that draws or resets. All ranks call it."""
        resumed, module = self._resumed, trainer.lightning_module
        apply_accumulation_schedule(trainer)
        self._resumed = None
        self._trained = self._trains = True
        for warning in (
            other_batch((resumed or {}).get("batch"), _batch_factors(trainer)),
            other_frozen((resumed or {}).get("frozen"), _frozen(trainer)),
        ):
            if warning:
                rank_zero_warn(warning)
        # Before the loops stop saying that they resume.
        made = (resumed or {}).get("reloaded")
        self._made = self._made if made is None else made
        loaders.recount_batches(trainer, made)
        loops.count_begun_epoch(trainer)
        if resumed is None:
            return
        trainer.should_stop = trainer.should_stop or bool(resumed.get("stop"))
        ranks, rank, size = resumed["ranks"], trainer.global_rank, trainer.world_size
        _warn_within_step(trainer, ranks[0])
        # On another number of ranks metrics are merged, and new ranks get generators of their own.
        load_metric_states(module, [each["metrics"] for each in ranks], rank=rank, world_size=size)
        results.restore_training_results(trainer, [each["logged"] for each in ranks], rank=rank)
        if len(ranks) == size:
            restore_buffers(module, ranks[rank].get(OWN_BUFFERS, {}))
        if begin := loaders.unsaved_generators(trainer):
            rank_zero_warn(
                f"These random number generators are in no checkpoint and start from the beginning: "
                f"{', '.join(begin)}. Save them in on_save_checkpoint, or a callback's or datamodule's state_dict."
            )
        if rank < len(ranks):
            rng.set_rng_state(ranks[rank]["rng"])
        else:
            rng.seed_rng(rng.derived_rng_seed(int(resumed["seed"]), rank, trainer.global_step))


def _batch_factors(trainer: Trainer) -> list[int]:
    """Ranks, batch size and accumulate_grad_batches. Empty if only a hook knows the batch size."""
    micro = loaders.train_batch_size(trainer)
    return [] if micro is None else [trainer.world_size, micro, trainer.accumulate_grad_batches]


def other_batch(saved: list[int] | None, now: list[int]) -> str | None:
    """Warning if a step takes another number of samples than before the checkpoint."""
    if not saved or not now or prod(saved) == prod(now):
        return None
    keeps, rest = divmod(prod(saved), now[0] * now[1])
    factors = "{} ranks x batch size {} x accumulate_grad_batches {}"
    return (
        f"A step took {prod(saved)} samples before the checkpoint ({factors.format(*saved)}) and takes {prod(now)} now "
        f"({factors.format(*now)}), but the learning rate may be tuned for the former. "
        + (f"accumulate_grad_batches: {keeps} keeps it." if not rest else "No accumulate_grad_batches keeps it.")
    )


def _frozen(trainer: Trainer) -> dict[str, bool]:
    return {name: not parameter.requires_grad for name, parameter in trainer.lightning_module.named_parameters()}


def other_frozen(saved: list[str] | None, frozen: Mapping[str, bool]) -> str | None:
    """Warning if other parameters are frozen than the ``saved`` ones. ``frozen``: by name."""
    other = [name for name, here in frozen.items() if saved is not None and here != (name in saved)]
    if not other:
        return None
    return (
        f"Frozen when the checkpoint was saved and trained here, or the other way round: {listed(other)}. Resuming "
        "repeats no freezing by hooks but by BaseFinetuning callbacks: freeze and thaw in on_train_start."
    )


def changed_by_validation(trainer: Trainer) -> dict[str, Any]:
    """Copies of this rank's state that a validation may change. A save during it keeps these."""
    return {**_changed_by_evaluation(trainer), OWN_BUFFERS: own_buffers(trainer.lightning_module)}


def _changed_by_evaluation(trainer: Trainer) -> dict[str, Any]:
    return {"rng": rng.rng_state(), "metrics": metric_states(trainer.lightning_module)}


# Steps of several batches, whose gradients no checkpoint has.

_WITHIN = "accumulation"  # Key of the number of batches since the last step, in a rank's own state.


def _state_within_step(trainer: Trainer) -> dict[str, Any]:
    """State between the batches of one step, with a warning. CheckpointError, on every rank: the fit goes on."""
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
    """Warn if a fit resumes between the batches of one step. ``own``: a rank's state in the checkpoint."""
    here = loops.accumulated_batches(trainer) if trainer.fit_loop.restarted_mid_epoch else 0
    if batches := own.get(_WITHIN, {}).get("batches", here):
        rank_zero_warn(
            f"The fit goes on after {batches} batches of one step, whose gradients are not read from checkpoints: the "
            "next step leaves them out. Resume from a checkpoint that was saved after a step, with as many batches for "
            "a step as before."
        )
