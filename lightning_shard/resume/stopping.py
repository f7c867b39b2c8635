"""The counters of Lightning's fit loop when a run stops between two batches, and when it goes on from there.

Works on the loop by its attributes, without importing Lightning. The counters are set for Lightning's own
classification of a loaded state (``_restart_stage``): it knows states written in ``on_train_batch_end`` and in the
middle of a validation, and after neither of them repeats or leaves out a batch.
"""

from __future__ import annotations

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
