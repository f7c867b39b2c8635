"""Where a run is in Lightning's loops, what is called between two batches and at its end, and its signal handlers.

The counters of the fit loop are set for Lightning's own classification of a loaded state (``_restart_stage``): it knows
states written in ``on_train_batch_end`` and in the middle of a validation, and after neither repeats or leaves out a
batch. It saves before or after it has counted: at an epoch's end under ``max_steps`` it takes the run for one in
mid-epoch (its ``restarting`` is forced for iteration-based training) and ends the next epoch after one batch; and
``max_steps``, ``max_time`` or ``should_stop`` in mid-epoch count the epoch as processed, so that its rest would come
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
    """A function for the end of every batch: with ``val_check_interval`` as a time, it has validation follow on all
    ranks when rank 0's clock says so, which they ``broadcast``.
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
    """How many batches the optimizer step to come has accumulated, between two batches or inside of one."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.processed == batches.ready and not should_accumulate(trainer):
        return 0
    return int(batches.processed) % trainer.accumulate_grad_batches


def prediction_batches(trainer: Trainer) -> int:
    """How many batches this rank's prediction loop will run, over all loaders; 0 if that is not known."""
    batches = sum(trainer.predict_loop.max_batches)
    return 0 if batches == float("inf") else int(batches)


def after_each_batch(replacements: Replacements, trainer: Trainer, *hooks: Callable[[], None]) -> None:
    """Call each hook when a training batch is counted and logged, ahead of a validation after it."""

    def on_advance_end(end: Callable[[Any], None], data_fetcher: Any) -> None:
        for hook in hooks:
            hook()
        end(data_fetcher)

    replacements.wrap(trainer.fit_loop.epoch_loop, "on_advance_end", on_advance_end)


Told = Callable[[str], object]
_HOOK = re.compile(r"\[(LightningModule|Callback)\](.*)\.(on_\w+|optimizer_step)$")


class FollowedProfiler(Delegating):
    """The Trainer's profiler, as ``trainer.profiler`` during a run, of whose actions others are told too: steps, saves,
    and the hooks that the module or a callback has, but for a progress bar's.
    """

    _own = frozenset({"followers", "_trainer", "_known"})

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(vars(trainer)["profiler"])
        self.followers: list[tuple[Told, Told]] = []
        self._trainer, self._known = trainer, dict[str, bool]()

    def __bool__(self) -> bool:
        return True

    def _is_told(self, action: str) -> bool:
        if action not in self._known:
            self._known[action] = _has_hook(self._trainer, action)
        return self._known[action]

    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if self._is_told(action_name):
            for begins, _ in self.followers:
                begins(action_name)

    def stop(self, action_name: str) -> None:
        if self._is_told(action_name):
            for _, ends in reversed(self.followers):
                ends(action_name)
        self._inner.stop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Generator[str, None, None]:
        """As Lightning's, of these two."""
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


def follow_actions(replacements: Replacements, trainer: Trainer, told: tuple[Told, Told]) -> Callable[[], None]:
    """Tell of the beginning and end of every action that Lightning names to its profiler. Returns what ends that."""
    if not isinstance(vars(trainer)["profiler"], FollowedProfiler):
        replacements.replace(trainer, "profiler", FollowedProfiler(trainer))
    followers = vars(trainer)["profiler"].followers
    followers.append(told)
    return lambda: followers.remove(told)


def keep_out_signal_handlers(replacements: Replacements, trainer: Trainer) -> None:
    """Keep out Lightning's signal handlers, which save in whatever line a signal comes. All ranks and the device would
    wait before every batch for the signals that they note.
    """
    # Nothing is installed, and so the connector's own teardown has nothing to put back.
    replacements.replace(trainer._signal_connector, "register_signal_handlers", lambda: None)
    replacements.replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


@contextmanager
def ending(replacements: Replacements, trainer: Trainer | None) -> Generator[None, None, None]:
    """Restore all replaced attributes once the body has ended the run, with an error or without. ``trainer`` is None if
    the run failed before it was set up.
    """
    try:
        yield
    finally:
        replacements.restore()
        # Of a resume that failed: the trainer's next run would go on with it.
        if trainer is not None:
            trainer._checkpoint_connector._loaded_checkpoint = {}


# When a run stops


def in_validation(trainer: Trainer) -> bool:
    """Whether a validation of a fit has begun, and its end was not reached."""
    hook = trainer.lightning_module._current_fx_name
    fits = trainer.validating and trainer.state.fn == TrainerFn.FITTING
    return fits and hook not in ("on_validation_end", "on_validation_model_train")


def data_fetcher(trainer: Trainer) -> Any:
    """What gives the training loop its batches."""
    return trainer.fit_loop._data_fetcher


def validation_follows(trainer: Trainer) -> bool:
    """Whether validation is run after the batch that has just ended."""
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
    """Whether the fit was told to stop, and goes on until it has had ``min_epochs`` and ``min_steps``."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    goes_on = epochs.processed < (trainer.min_epochs or 0) or trainer.global_step < (trainer.min_steps or 0)
    return bool(trainer.should_stop and goes_on)


def mark_after_batch(trainer: Trainer) -> None:
    """Make the counters those of a state saved in ``on_train_batch_end``, as `saved_after_batch` takes it."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    for counter in (batches.total, batches.current):
        counter.completed = counter.processed - 1


@contextmanager
def counted_in_batch(trainer: Trainer) -> Generator[None, None, None]:
    """Inside, the counters are as `mark_after_batch` makes them."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    total, current = batches.total.completed, batches.current.completed
    mark_after_batch(trainer)
    try:
        yield
    finally:
        batches.total.completed, batches.current.completed = total, current


def _mark_before_validation(val: dict[str, Any]) -> None:
    """Make counters those of a state saved in the first batch of validation, so that it runs again in full."""
    before = val["total"]["completed"] - val["current"]["completed"]
    for counter, done in ((val["total"], before), (val["current"], 0)):
        counter.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    val["is_last_batch"] = False


def saved_after_batch(
    trainer: Trainer, loops: Mapping[str, Any]
) -> tuple[dict[str, Any], Literal["validation", "end of the epoch"] | None]:
    """A changed copy of the loops' part of a checkpoint, and what comes next of those two. Lightning takes a
    validation after the batch in which it saves, and the end of the epoch, for done; where one is still to come, the
    state is made that of the moment before it.
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
        # The loop counts it after the batch, which it has no part in any more when it goes on.
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    return state, "validation" if validates else "end of the epoch"


# When a run goes on


def settle_progress(trainer: Trainer) -> None:
    """Make the fit loop's loaded counters say what an uninterrupted run's would; after the loops' state was loaded and
    before the dataloaders' is. No communication; may be called again.
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
                # Where the epoch's end comes next a stream has nothing more to give, not even to be fetched ahead.
                state["spent"] = state["kind"] == "iterable" and current.started == current.processed + 1
    if current.started == current.ready - 1:
        # Saved in ``on_train_epoch_start``, with the batches of the epoch before.
        loop.epoch_loop.restarting = batches.is_last_batch = False
    elif batches.is_last_batch and closed:
        _begin_epoch_anew(trainer)
    elif not batches.is_last_batch and closed and batches.current.ready > 0:
        for counter in (epochs.total, epochs.current):
            counter.processed -= 1
            counter.completed = min(counter.completed, counter.processed)
        loop.restarting = True


def _count_ended_epochs(batches: Any) -> None:
    """Count the batches at which ``on_train_batch_start`` ended an epoch by -1, and those that are None, as others:
    Lightning, which compares the totals, takes any later state for one in the middle of a batch, and repeats its index.
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
    """The states that the training loaders still get, one after the other."""
    return trainer.fit_loop._combined_loader_states_to_load


def leave_restart(trainer: Trainer) -> None:
    """Let the fit loop, not those in it, not restart, which its own setter forces in iteration-based training."""
    trainer.fit_loop._restarting = False


def _begin_epoch_anew(trainer: Trainer) -> None:
    leave_restart(trainer)
    trainer.fit_loop.epoch_loop.restarting = False


def count_begun_epoch(trainer: Trainer) -> None:
    """When training starts at an epoch's start: count that epoch, which Lightning forgets, so that states saved in it
    would be taken for those of the epoch before.
    """
    if trainer.fit_loop.restarted_on_epoch_start:
        current = trainer.fit_loop.epoch_progress.current
        current.ready = current.completed + 1


def end_epoch(replacements: Replacements, trainer: Trainer) -> None:
    """After loading a state at the end of an epoch: run no batch, no validation, but step the epoch's schedulers."""
    loop = trainer.fit_loop.epoch_loop

    def reset(reset_for_once: Callable[[], None]) -> None:
        replacements.restore(loop, "reset")
        reset_for_once()
        _begin_epoch_anew(trainer)

    replacements.wrap(loop, "reset", reset)


def settle_validation(replacements: Replacements, trainer: Trainer) -> None:
    """After loading, and before the loop runs: let a validation that is due run although the training has ended."""
    trainer.fit_loop.epoch_loop.val_loop._has_run = False  # in an earlier fit, for which all epochs would have no batch
    if _stopped_in_validation(trainer) and _steps_are_done(trainer):
        replacements.replace(trainer.fit_loop.epoch_loop, "max_steps", trainer.global_step + 1)


def count_validation_anew(replacements: Replacements, trainer: Trainer) -> None:
    """When validation starts again: forget the batch in which it stopped, which later states would seem to be in."""
    loop = trainer.fit_loop.epoch_loop
    if _stopped_in_validation(trainer):
        total: Any = loop.val_loop.batch_progress.total
        total.ready = total.started = total.processed
    replacements.restore(loop, "max_steps")


def _stopped_in_validation(trainer: Trainer) -> bool:
    total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    return bool(total.ready == total.started == total.processed + 1 and total.completed == total.processed)


def restore_steps(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Restore schedulers, the precision plugin and the count of optimizer steps, not the loops' place in the data."""
    kinds = kinds_of(trainer.lr_scheduler_configs)
    if checkpoint[RUN_STATE].get(SCHEDULES, kinds) == kinds:  # else a callback has put its own in their place
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
