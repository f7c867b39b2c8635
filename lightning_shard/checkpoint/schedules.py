"""Learning rate schedules of a resumed run: settings that differ from the saved ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_shard.checkpoint.files.layout import RUN_STATE
from lightning_shard.errors import CheckpointMismatchError

SCHEDULES = "schedules"
"""Key in a run's state of the classes of its schedulers."""

_PROGRESS = {
    *("last_epoch", "_step_count", "_get_lr_called_within_step", "_is_initial", "_last_lr", "_initial_step"),
    *("best", "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur", "T_i"),
}
"""Entries of the state of torch's schedulers that change with their steps."""


def kinds_of(schedules: Sequence[Any]) -> list[str]:
    return [type(schedule.scheduler).__qualname__ for schedule in schedules]


def resolve_schedules(schedules: Sequence[Any], state: Mapping[str, Any], *, configured: bool) -> list[str]:
    """Put the winning settings of schedulers into ``state``, which Lightning loads. Live ones win if ``configured``.

    Returned: the differences in words. CheckpointMismatchError: schedules of other classes were saved.
    """
    differed = []
    here = kinds_of(schedules)
    saved_as = state.get(RUN_STATE, {}).get(SCHEDULES, here)
    if saved_as != here and state.get("lr_schedulers"):
        was, now = (", ".join(names) or "none" for names in (saved_as, here))
        raise CheckpointMismatchError(
            f"the learning rate's schedules were {was} when the checkpoint was saved, and are {now} here: build those "
            "that were saved, or start new ones by checkpoint['lr_schedulers'] = [] in on_load_checkpoint"
        )
    for number, (schedule, saved) in enumerate(zip(schedules, state.get("lr_schedulers", []), strict=False)):
        for name, there, live in list(differing(schedule.scheduler, saved)):
            winner, other = (live, there) if configured else (there, live)
            # The groups report their first rates themselves.
            if name != "base_lrs":
                differed.append(f"{name} of schedule {number} is {winner[name]}, not {other[name]}")
            there[name] = winner[name]
    return differed


def differing(scheduler: Any, saved: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield name, saved and live state of each setting that differs, of a torch scheduler or one inside of it."""
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
