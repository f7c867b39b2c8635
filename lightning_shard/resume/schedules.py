"""Settings of learning rate schedulers in which a checkpoint and the configuration differ."""

from collections.abc import Iterator
from typing import Any

_PROGRESS = {
    *("last_epoch", "_step_count", "_get_lr_called_within_step", "_is_initial", "_last_lr", "_initial_step"),
    *("best", "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur", "T_i"),
}
"""Entries of the state of torch's schedulers that change as these step."""


def differing(scheduler: Any, saved: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each setting of one of torch's own schedulers that is not the one in its ``saved`` state.

    Yields its name, and the saved and the live state that have it: those of a scheduler inside of it too.
    """
    if type(scheduler).__module__ == "torch.optim.lr_scheduler":
        yield from _differing(saved, scheduler.state_dict())


def _differing(saved: Any, live: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name in sorted((saved.keys() & live.keys()) - _PROGRESS):
        if name == "_schedulers":
            if len(saved[name]) == len(live[name]):
                for inner_saved, inner_live in zip(saved[name], live[name], strict=True):
                    yield from _differing(inner_saved, inner_live)
        elif saved[name] != live[name]:
            yield name, saved, live
