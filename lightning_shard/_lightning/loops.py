"""A run's position in Lightning's loops, calls between two batches and at its end, and signal handlers.

The counters of the fit loop are set for Lightning's own classification of a loaded state (``_restart_stage``). It knows
states written in ``on_train_batch_end`` and in the middle of a validation, and repeats or skips no batch after these.
Other saves come before or after it has counted. At an epoch's end under ``max_steps`` it takes the run for one in
mid-epoch (``restarting`` is forced for iteration-based training) and ends the next epoch after one batch. A stop by
``max_steps``, ``max_time`` or ``should_stop`` in mid-epoch counts the epoch as processed, so that its rest would come
from the next epoch's order.
"""

import copy
import math
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_shard._lightning import Replacements
from lightning_shard.checkpoint.files.layout import RUN_STATE
from lightning_shard.checkpoint.schedules import SCHEDULES, kinds_of
from lightning_shard.resume.shape import KINDS, Delegating


def validate_by_one_clock(trainer: Any, broadcast: Callable[[bool], bool]) -> Callable[[], None]:
    """A function for the end of every batch. With ``val_check_interval`` as a time, all ranks validate when rank 0's
    clock says so, by ``broadcast``.
    """
    began = time.monotonic()

    def agree() -> None:
        nonlocal began
        if trainer.val_check_batch is not None:
            return
        if math.isfinite(trainer._last_val_time):  # Lightning has set it since, at the start or after a validation.
            began = trainer._last_val_time
        trainer._last_val_time = began
        due = broadcast(trainer.fit_loop.epoch_loop._should_check_val_fx(data_fetcher(trainer)))
        trainer._last_val_time = -math.inf if due else math.inf

    return agree


def should_accumulate(trainer: Trainer) -> bool:
    """Whether this batch's gradients are only added up, with no optimizer step after it."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    return bool(batches.current.ready % trainer.accumulate_grad_batches) and not batches_are_done(trainer)


def accumulated_batches(trainer: Trainer) -> int:
    """Number of batches that the next optimizer step has accumulated, between two batches or inside of one."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.processed == batches.ready and not should_accumulate(trainer):
        return 0
    return int(batches.processed) % trainer.accumulate_grad_batches


def prediction_batches(trainer: Trainer) -> int:
    """Number of batches that this rank's prediction loop will run, over all loaders, 0 if unknown."""
    batches = sum(trainer.predict_loop.max_batches)
    return 0 if batches == float("inf") else int(batches)


def after_each_batch(replacements: Replacements, trainer: Trainer, *hooks: Callable[[], None]) -> None:
    """Call each hook once a training batch is counted and logged, before a validation that follows it."""

    def on_advance_end(end: Callable[[Any], None], data_fetcher: Any) -> None:
        for hook in hooks:
            hook()
        end(data_fetcher)

    replacements.wrap(trainer.fit_loop.epoch_loop, "on_advance_end", on_advance_end)


Follower = Callable[[str], object]
_HOOK = re.compile(r"\[(LightningModule|Callback)\](.*)\.(on_\w+|optimizer_step)$")


class FollowedProfiler(Delegating):
    """The Trainer's profiler during a run, which also tells followers of actions: steps, saves, and overridden hooks of
    the module or a callback, except progress bars.
    """

    _own = frozenset({"followers", "_trainer", "_known"})

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(vars(trainer)["profiler"])
        self.followers: list[tuple[Follower, Follower]] = []
        self._trainer, self._known = trainer, dict[str, bool]()

    def __bool__(self) -> bool:
        return True

    def _is_followed(self, action: str) -> bool:
        if action not in self._known:
            self._known[action] = _has_hook(self._trainer, action)
        return self._known[action]

    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if self._is_followed(action_name):
            for begins, _ in self.followers:
                begins(action_name)

    def stop(self, action_name: str) -> None:
        if self._is_followed(action_name):
            for _, ends in reversed(self.followers):
                ends(action_name)
        self._inner.stop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Generator[str, None, None]:
        """`start` and `stop`, as Lightning's own method."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)


def _has_hook(trainer: Trainer, action: str) -> bool:
    owner, name, hook = match.groups() if (match := _HOOK.match(action)) else ("", "", "")
    if owner == "LightningModule":
        return is_overridden(hook, trainer.lightning_module)
    named = [callback for callback in trainer.callbacks if owner and callback.state_key == name]  # type: ignore[attr-defined]
    return not named or any(is_overridden(hook, c) and not isinstance(c, ProgressBar) for c in named)


def follow_actions(replacements: Replacements, trainer: Trainer, told: tuple[Follower, Follower]) -> Callable[[], None]:
    """Call ``told`` at the beginning and end of every action that Lightning names to its profiler. Returns the undo."""
    if not isinstance(vars(trainer)["profiler"], FollowedProfiler):
        replacements.replace(trainer, "profiler", FollowedProfiler(trainer))
    followers = vars(trainer)["profiler"].followers
    followers.append(told)
    return lambda: followers.remove(told)


def keep_out_signal_handlers(replacements: Replacements, trainer: Trainer) -> None:
    """Keep out Lightning's signal handlers, which save at any line of code. All ranks and the device would wait before
    every batch to exchange the noted signals.
    """
    # As none is installed, the connector's own teardown has none to restore.
    replacements.replace(trainer._signal_connector, "register_signal_handlers", lambda: None)
    replacements.replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


@contextmanager
def restored_at_end(replacements: Replacements, trainer: Trainer | None) -> Generator[None, None, None]:
    """Restore all replaced attributes once the body has ended the run, with or without an error. ``trainer`` is None if
    the run failed before it was set up.
    """
    try:
        yield
    finally:
        replacements.restore()
        # The trainer's next run would use the checkpoint of a resume that failed.
        if trainer is not None:
            trainer._checkpoint_connector._loaded_checkpoint = {}


# When a run stops


def in_validation(trainer: Trainer) -> bool:
    """Whether a fit is in a validation."""
    hook = trainer.lightning_module._current_fx_name
    fits = trainer.validating and trainer.state.fn == TrainerFn.FITTING
    return fits and hook not in ("on_validation_end", "on_validation_model_train")


def data_fetcher(trainer: Trainer) -> Any:
    """Source of the training loop's batches."""
    return trainer.fit_loop._data_fetcher


def validation_follows(trainer: Trainer) -> bool:
    """Whether validation follows the batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(data_fetcher(trainer)) and not loop._skip_next_val)


def nothing_follows(trainer: Trainer) -> bool:
    """Whether the epoch, or the training, ends with the batch that has just ended."""
    stops = trainer.should_stop and not stop_is_due(trainer)
    return stops or _steps_are_done(trainer) or batches_are_done(trainer)


def _steps_are_done(trainer: Trainer) -> bool:
    loop = trainer.fit_loop.epoch_loop
    return loop.max_steps != -1 and loop.global_step >= loop.max_steps


def batches_are_done(trainer: Trainer) -> bool:
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    return bool(batches.is_last_batch or batches.current.ready == trainer.num_training_batches)


def stop_is_due(trainer: Trainer) -> bool:
    """Whether the fit was told to stop, but goes on until ``min_epochs`` and ``min_steps``."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    goes_on = epochs.processed < (trainer.min_epochs or 0) or trainer.global_step < (trainer.min_steps or 0)
    return bool(trainer.should_stop and goes_on)


def mark_after_batch(trainer: Trainer) -> None:
    """Set the counters as in a state saved in ``on_train_batch_end``, as `saved_after_batch` expects it."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    for counter in (batches.total, batches.current):
        counter.completed = counter.processed - 1


@contextmanager
def counted_in_batch(trainer: Trainer) -> Generator[None, None, None]:
    """Inside, the counters are set by `mark_after_batch`."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    total, current = batches.total.completed, batches.current.completed
    mark_after_batch(trainer)
    try:
        yield
    finally:
        batches.total.completed, batches.current.completed = total, current


def _mark_before_validation(val: dict[str, Any]) -> None:
    """Set counters as in a state saved in the first batch of validation, so that all of it runs again."""
    before = val["total"]["completed"] - val["current"]["completed"]
    for counter, done in ((val["total"], before), (val["current"], 0)):
        counter.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    val["is_last_batch"] = False


def saved_after_batch(
    trainer: Trainer, loops: Mapping[str, Any]
) -> tuple[dict[str, Any], Literal["validation", "end of the epoch"] | None]:
    """A corrected copy of the loops' part of a checkpoint, and the next event, if it is one of these two. Lightning
    takes a validation after the batch in which it saves, and the end of the epoch, for done. If one is still to come,
    the copy's state is the one before it.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    interrupted = in_validation(trainer)
    if not interrupted and batches.completed != batches.processed - 1:
        return dict(loops), None
    validates = interrupted or validation_follows(trainer)
    if not validates and not batches_are_done(trainer):
        return dict(loops), None
    state = copy.deepcopy(dict(loops))
    fit = state["fit_loop"]
    for counter in ("total", "current"):
        counted = fit["epoch_loop.batch_progress"][counter]
        counted["completed"] = counted["processed"]
    if validates:
        _mark_before_validation(fit["epoch_loop.val_loop.batch_progress"])
    elif not should_accumulate(trainer):
        # The loop counts it after the batch, and a resumed loop does not run that code for this batch.
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    return state, "validation" if validates else "end of the epoch"


# When a run is resumed


def correct_loaded_counters(trainer: Trainer) -> None:
    """Set the fit loop's loaded counters as in an uninterrupted run, after the loops' state was loaded and before the
    dataloaders'. No communication. May be called again.
    """
    loop = trainer.fit_loop
    if not loop.is_resuming:
        return
    batches: Any = loop.epoch_loop.batch_progress
    _count_ended_epochs(batches)
    epochs: Any = loop.epoch_progress
    current = epochs.current
    closed = 0 < current.ready == current.started == current.processed
    if batches.is_last_batch:
        # With limit_train_batches the loader itself has more.
        for state in loader_states_to_load(trainer):
            if state.get("kind") in KINDS:
                state["finished"] = True
                # If the epoch's end comes next, a stream has no batch left, not even to be fetched ahead.
                state["spent"] = state["kind"] == "iterable" and current.started == current.processed + 1
    if current.started == current.ready - 1:
        # Saved in ``on_train_epoch_start``, with the batches of the epoch before.
        loop.epoch_loop.restarting = batches.is_last_batch = False
    elif batches.is_last_batch and closed:
        _start_new_epoch(trainer)
    elif not batches.is_last_batch and closed and batches.current.ready > 0:
        for counter in (epochs.total, epochs.current):
            counter.processed -= 1
            counter.completed = min(counter.completed, counter.processed)
        loop.restarting = True


def _count_ended_epochs(batches: Any) -> None:
    """Count batches at which ``on_train_batch_start`` ended an epoch by -1, and None batches, as others. Lightning
    compares the totals: it would take any later state for one in the middle of a batch, and repeat its index.
    """
    current, total = batches.current, batches.total
    if batches.is_last_batch and current.started == current.completed == current.processed - 1:
        current.completed = current.processed
    current.started = max(current.started, current.processed)
    for counted in ("started", "processed", "completed"):
        setattr(total, counted, total.ready - current.ready + getattr(current, counted))


def resumes_in_mid_epoch(trainer: Trainer) -> bool:
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    return bool(trainer.fit_loop.restarting and not batches.is_last_batch and batches.current.ready)


def loader_states_to_load(trainer: Trainer) -> list[dict[str, Any]]:
    """States that the training loaders have yet to load, in their order."""
    return trainer.fit_loop._combined_loader_states_to_load


def leave_restart(trainer: Trainer) -> None:
    """Unset ``restarting`` of the fit loop but not of its inner loops. In iteration-based training its setter forces
    it.
    """
    trainer.fit_loop._restarting = False


def _start_new_epoch(trainer: Trainer) -> None:
    leave_restart(trainer)
    trainer.fit_loop.epoch_loop.restarting = False


def count_begun_epoch(trainer: Trainer) -> None:
    """Count the epoch if a resumed training starts at its start. Lightning forgets to: states saved in it would be
    taken for states of the epoch before.
    """
    if trainer.fit_loop.restarted_on_epoch_start:
        current = trainer.fit_loop.epoch_progress.current
        current.ready = current.completed + 1


def end_epoch(replacements: Replacements, trainer: Trainer) -> None:
    """After loading a state from an epoch's end, run no batch and no validation, but step the epoch's schedulers."""
    loop = trainer.fit_loop.epoch_loop

    def reset(reset_for_once: Callable[[], None]) -> None:
        replacements.restore(loop, "reset")
        reset_for_once()
        _start_new_epoch(trainer)

    replacements.wrap(loop, "reset", reset)


def run_due_validation(replacements: Replacements, trainer: Trainer) -> None:
    """After loading and before the loop runs, let a validation that is due run although the training has ended."""
    trainer.fit_loop.epoch_loop.val_loop._has_run = False  # if set, by an earlier fit, all epochs have no batch
    if _stopped_in_validation(trainer) and _steps_are_done(trainer):
        replacements.replace(trainer.fit_loop.epoch_loop, "max_steps", trainer.global_step + 1)


def reset_validation_count(replacements: Replacements, trainer: Trainer) -> None:
    """When validation starts again, uncount the batch in which it stopped, or later states would seem to be in it."""
    loop = trainer.fit_loop.epoch_loop
    if _stopped_in_validation(trainer):
        total: Any = loop.val_loop.batch_progress.total
        total.ready = total.started = total.processed
    replacements.restore(loop, "max_steps")


def _stopped_in_validation(trainer: Trainer) -> bool:
    total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    return bool(total.ready == total.started == total.processed + 1 and total.completed == total.processed)


def restore_steps(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Restore schedulers, the precision plugin and the count of optimizer steps, but no position in the data."""
    kinds = kinds_of(trainer.lr_scheduler_configs)
    if checkpoint[RUN_STATE].get(SCHEDULES, kinds) == kinds:  # else a callback has replaced them
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False):
            config.scheduler.load_state_dict(state)
    plugin = trainer.precision_plugin
    if (state := checkpoint.get(type(plugin).__qualname__)) is not None:
        plugin.load_state_dict(state)
    loop, saved = trainer.fit_loop.epoch_loop, checkpoint["loops"]["fit_loop"]
    automatic, manual = loop.automatic_optimization, loop.manual_optimization
    automatic.optim_progress.load_state_dict(saved["epoch_loop.automatic_optimization.optim_progress"])
    manual.optim_step_progress.load_state_dict(saved["epoch_loop.manual_optimization.optim_step_progress"])
    loop.on_load_checkpoint(saved["epoch_loop.state_dict"])
