"""The counters of Lightning's fit loop when a run stops between two batches, and when it goes on from there.

Works on the loop by its attributes, without importing Lightning. The counters are set for Lightning's own
classification of a loaded state (``_restart_stage``): it knows states written in ``on_train_batch_end`` and in the
middle of a validation, and after neither of them repeats or leaves out a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def validation_follows(fit_loop: Any, fetcher: Any) -> bool:
    """Whether validation is run after the batch that has just ended."""
    loop = fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(fetcher) and not loop._skip_next_val)


def nothing_follows(fit_loop: Any) -> bool:
    """Whether the epoch, or the training, ends with the batch that has just ended."""
    loop = fit_loop.epoch_loop
    return bool(loop._is_training_done or (fit_loop.trainer.should_stop and fit_loop._can_stop_early))


def mark_after_batch(fit_loop: Any) -> None:
    """Make the counters those of a state saved in ``on_train_batch_end``; the next batch is where the run goes on."""
    for counter in (fit_loop.epoch_loop.batch_progress.total, fit_loop.epoch_loop.batch_progress.current):
        counter.completed = counter.processed - 1


def mark_before_validation(fit_loop: Any) -> None:
    """Make the counters those of a state saved in the first batch of validation, so that it runs again, whole."""
    val = fit_loop.epoch_loop.val_loop.batch_progress
    before = val.total.completed - val.current.completed
    for counter, done in ((val.total, before), (val.current, 0)):
        counter.processed = counter.completed = done
        counter.ready = counter.started = done + 1
    val.is_last_batch = False


def saved_after_batch(fit_loop: Any, loops: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The loops' part of a checkpoint, such that nothing is left out that follows the batch in which it is saved.

    Lightning takes a state saved in ``on_train_batch_end`` for one in which the validation after that batch, and the
    end of the epoch, have been. Where one of them is still to come, the state is made that of the moment before it.

    Args:
        fit_loop: of a fit, which is anywhere.
        loops: the loops' state in the checkpoint; not changed.

    Returns:
        The state, and whether the end of the epoch comes next, for `end_epoch` to be told.
    """
    loop = fit_loop.epoch_loop
    batches = loop.batch_progress.total
    if batches.completed != batches.processed - 1:
        return dict(loops), False
    validates = validation_follows(fit_loop, fit_loop._data_fetcher)
    if not validates and not loop._num_ready_batches_reached():
        return dict(loops), False
    state = copy.deepcopy(dict(loops))
    fit = state["fit_loop"]
    for counter in ("total", "current"):
        counted = fit["epoch_loop.batch_progress"][counter]
        counted["completed"] = counted["processed"]
    if validates:
        _mark_before_validation(fit["epoch_loop.val_loop.batch_progress"])
    elif not loop._should_accumulate():
        # The loop counts it after the batch, which it has no part in any more when it goes on.
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    return state, not validates


def end_epoch(fit_loop: Any) -> None:
    """After loading a state from which the end of the epoch comes next: run no batch before it, and no validation.

    The loops do not restart then as soon as their counters are set, so that the epoch's schedulers are stepped too.
    """
    loop = fit_loop.epoch_loop

    def reset() -> None:
        del loop.reset
        loop.reset()
        loop._restarting = fit_loop._restarting = False

    # On the instance, for once.
    loop.reset = reset


def _mark_before_validation(val: dict[str, Any]) -> None:
    """As `mark_before_validation`, on a state."""
    before = val["total"]["completed"] - val["current"]["completed"]
    for counter, done in ((val["total"], before), (val["current"], 0)):
        counter.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    val["is_last_batch"] = False


def settle_validation(fit_loop: Any) -> int | None:
    """After loading, and before the loop runs: let a validation that is due run although the training has ended.

    Returns ``max_steps``, which the loop has to be given back when validation starts, or None: nothing was changed.
    """
    loop = fit_loop.epoch_loop
    if not _stopped_in_validation(loop) or loop.max_steps == -1 or loop.global_step < loop.max_steps:
        return None
    limit = int(loop.max_steps)
    loop.max_steps = loop.global_step + 1
    return limit


def count_validation_anew(fit_loop: Any) -> None:
    """When validation starts again: forget the batch in which it stopped, which later states would seem to be in."""
    loop = fit_loop.epoch_loop
    if _stopped_in_validation(loop):
        total = loop.val_loop.batch_progress.total
        total.ready = total.started = total.processed


def _stopped_in_validation(epoch_loop: Any) -> bool:
    total = epoch_loop.val_loop.batch_progress.total
    return bool(total.ready == total.started == total.processed + 1 and total.completed == total.processed)
