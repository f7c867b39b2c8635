"""Where a run is in Lightning's loops, what is called between two batches and at its end, and its signal handlers."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lightning_shard._lightning.replaced import Replacements


def use_no_grad_in_evaluation(replacements: Replacements, trainer: Trainer) -> None:
    """Run every evaluation loop under ``torch.no_grad`` instead of ``torch.inference_mode``.

    What FSDP2 gathers under inference mode are inference tensors, which the next training step can't update.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        replacements.replace(loop, "inference_mode", False)


def validate_by_one_clock(replacements: Replacements, trainer: Trainer, broadcast: Callable[[bool], bool]) -> None:
    """With ``val_check_interval`` as a time, validate when rank 0's clock says so: the others' may differ.

    ``broadcast`` gives rank 0's value; all ranks call it, after each batch.
    """
    loop = trainer.fit_loop.epoch_loop
    due_here = loop._should_check_val_fx
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        replacements.replace(loop, "_should_check_val_fx", lambda fetcher: broadcast(due_here(fetcher)))


def should_accumulate(trainer: Trainer) -> bool:
    """Whether this batch's gradients are only added up, with no optimizer step after it."""
    return trainer.fit_loop._should_accumulate()


def accumulated_batches(trainer: Trainer) -> int:
    """How many batches the optimizer step to come has accumulated, between two batches or inside of one."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.processed == batches.ready and not should_accumulate(trainer):
        return 0
    return int(batches.processed) % trainer.accumulate_grad_batches


def processed_batches(trainer: Trainer) -> int:
    """How many training batches the fit has behind it."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(batches.processed)


def begins_accumulation(trainer: Trainer) -> bool:
    """Whether Lightning drops the gradients of the step before in this batch."""
    return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0


def prediction_batches(trainer: Trainer) -> int:
    """How many batches this rank's prediction loop will run, over all loaders; 0 if that is not known."""
    batches = sum(trainer.predict_loop.max_batches)
    return 0 if batches == float("inf") else int(batches)


def after_each_batch(replacements: Replacements, trainer: Trainer, *hooks: Callable[[Any], None]) -> None:
    """Call each ``hook(data_fetcher)`` when a training batch is counted and logged, ahead of a validation after it."""
    loop = trainer.fit_loop.epoch_loop
    end = loop.on_advance_end

    def on_advance_end(data_fetcher: Any) -> None:
        for hook in hooks:
            hook(data_fetcher)
        end(data_fetcher)

    replacements.replace(loop, "on_advance_end", on_advance_end)


Told = Callable[[str], object]


def follow_actions(replacements: Replacements, trainer: Trainer, told: tuple[Told, Told] | None) -> None:
    """Tell of the beginning and end of every action that Lightning names to its profiler: hooks, steps, saves."""
    if told is None:
        return
    begins, ends = told
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    start, stop = profiler.start, profiler.stop

    def on_start(action_name: str) -> None:
        start(action_name)
        begins(action_name)

    def on_stop(action_name: str) -> None:
        ends(action_name)
        stop(action_name)

    # Lightning calls both by name, from `profile` too.
    replacements.replace(profiler, "start", on_start)
    replacements.replace(profiler, "stop", on_stop)


def leave_signals_alone(replacements: Replacements, trainer: Trainer) -> None:
    """Keep Lightning from installing its signal handlers in this run.

    They save, requeue and broadcast inside the handler, on whatever rank and in whatever line the signal comes. What
    they note is broadcast by rank 0 before every batch, and read: a wait for all ranks and for the device in every
    step, which goes with them.
    """
    # Nothing was installed, and so the connector's own teardown has nothing to put back.
    replacements.replace(trainer._signal_connector, "register_signal_handlers", lambda: None)
    replacements.replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def at_end_of_run(replacements: Replacements, trainer: Trainer, *hooks: Callable[[], None]) -> None:
    """Call each hook at the end of this run, however it ends, after the strategy's teardown; then restore all.

    Call this before anything else is replaced. What an earlier run left that did not come to its end is restored first.
    """
    replacements.restore()
    connector = trainer._signal_connector
    teardown = connector.teardown

    def teardown_and_restore() -> None:
        try:
            for end in (teardown, *hooks):
                end()
        finally:
            replacements.restore()

    replacements.replace(connector, "teardown", teardown_and_restore)
