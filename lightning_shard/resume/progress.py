"""A trainer's counters after loading a checkpoint, brought in line with where the data is.

Works on Lightning's fit loop by its attributes, without importing Lightning. Two states that it loads do not mean
where the data goes on, because it saves before or after it has counted:

- At an epoch's end under ``max_steps`` it takes the run for one in mid-epoch (its ``restarting`` is forced for
  iteration-based training) and ends the next epoch after one batch.
- ``max_steps``, ``max_time`` or ``should_stop`` in mid-epoch count the epoch as processed, so that the rest of it
  would be taken from the next epoch's order.
"""

from __future__ import annotations

from typing import Any

from lightning_shard.resume.iterable import has_state
from lightning_shard.resume.shape import KINDS
from lightning_shard.resume.wrap import resumable


def prepare_loader(fit_loop: Any, dataloader: Any, *, world_size: int, rank: int) -> Any:
    """The training `dataloader` made :func:`resumable`, with the loop's loaded counters settled.

    For the strategy to call for each training dataloader that it is asked to process, on all ranks, in the order of
    the loaders. Lightning loads the states of the loaders only for an interrupted epoch; after a finished one they
    are loaded here, because generators and persistent workers outlive an epoch.
    """
    settle_progress(fit_loop)
    loader = resumable(dataloader, world_size=world_size, rank=rank)
    states = fit_loop._combined_loader_states_to_load
    if fit_loop._loaded_from_state_dict and not fit_loop.restarting and states and has_state(loader):
        state = states.pop(0)
        if loader is not dataloader and state.get("kind") in KINDS:
            loader.load_state_dict(state | {"finished": True})
    return loader


def settle_progress(fit_loop: Any) -> None:
    """Make the loaded counters of `fit_loop` say what an uninterrupted run's would (all ranks, no communication).

    To be called after the loops' state was loaded and before the dataloaders' is. Does nothing to a run that was
    not loaded; may be called again.
    """
    if not fit_loop._loaded_from_state_dict:
        return
    batches, epochs = fit_loop.epoch_loop.batch_progress, fit_loop.epoch_progress
    current = epochs.current
    closed = 0 < current.ready == current.started == current.processed
    if batches.is_last_batch:
        # With limit_train_batches the loader itself has more.
        for state in fit_loop._combined_loader_states_to_load:
            if state.get("kind") in KINDS:
                state["finished"] = True
        if closed:
            _stop_restarting(fit_loop)
    elif closed and batches.current.ready > 0:
        for counter in (epochs.total, epochs.current):
            counter.processed -= 1
            counter.completed = min(counter.completed, counter.processed)
        fit_loop.restarting = True


def place_batches(fit_loop: Any) -> None:
    """Count the batches of an interrupted epoch in the units of the present loaders (all ranks).

    Call it after the dataloaders' state was loaded and the loops were reset: in the strategy's ``on_train_start``.
    Tells iterable loaders how far the loop fetches ahead; changes counters only if the world size or the batch
    size has changed.
    """
    fetcher = fit_loop._data_fetcher
    for loader in fit_loop._combined_loader.flattened:
        if hasattr(loader, "lookahead"):
            loader.lookahead = getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0
    if not fit_loop._loaded_from_state_dict or not fit_loop.restarting:
        return
    loaders = [loader for loader in fit_loop._combined_loader.flattened if hasattr(loader, "batches_done")]
    sized = [loader for loader in loaders if loader.batches_done and hasattr(loader, "samples_seen")]
    if not sized:
        return
    # The longest one sets the length of an epoch.
    done = max(sized, key=len).batches_done
    epoch_loop = fit_loop.epoch_loop
    current = epoch_loop.batch_progress.current
    if current.ready == done:
        return
    done = int(min(done, fit_loop.max_batches))
    current.ready = current.started = current.processed = done
    # The loop's own reset counts the batch as completed that the checkpoint was written in.
    current.completed = done - 1 if epoch_loop.restarted_on_train_batch_end else done


def _stop_restarting(loop: Any) -> None:
    # The setter of `restarting` would force it back on for iteration-based training.
    loop._restarting = False
    for child in vars(loop).values():
        if hasattr(child, "_restarting") and child is not loop.trainer:
            _stop_restarting(child)
