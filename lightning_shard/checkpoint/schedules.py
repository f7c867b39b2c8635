"""The learning rate schedules of a run that goes on: which settings win where they differ from those saved."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_shard.checkpoint.files.layout import RUN_STATE
from lightning_shard.ranks import warn_on_first_rank

SCHEDULES = "schedules"
"""Where a run's state says of which classes its schedulers are."""

_PROGRESS = {
    *("last_epoch", "_step_count", "_get_lr_called_within_step", "_is_initial", "_last_lr", "_initial_step"),
    *("best", "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur", "T_i"),
}
"""Entries of the state of torch's schedulers that change as these step."""


def kinds_of(schedules: Sequence[Any]) -> list[str]:
    return [type(schedule.scheduler).__qualname__ for schedule in schedules]


def settle_schedules(schedules: Sequence[Any], state: Mapping[str, Any], *, configured: bool) -> list[str]:
    """Put the winner's settings of schedulers into ``state``, which Lightning loads; what differed, in words."""
    differed = []
    here = kinds_of(schedules)
    saved_as = state.get(RUN_STATE, {}).get(SCHEDULES, here)
    if saved_as != here:
        was, now = (", ".join(names) or "none" for names in (saved_as, here))
        warn_on_first_rank(
            f"The learning rate's schedules were {was} when the checkpoint was saved, and are {now} here. One in the "
            "place of another goes on from its number of steps and its learning rate, by its own rule and settings."
        )
    for number, (schedule, saved) in enumerate(zip(schedules, state.get("lr_schedulers", []), strict=False)):
        if here[number] != [*saved_as, *here][number]:
            if _is_torchs(schedule.scheduler):  # another may have any state
                own = schedule.scheduler.state_dict()
                kept = {name: saved[name] for name in saved.keys() & own & {"last_epoch", "_step_count", "_last_lr"}}
                saved.clear()
                saved.update({**own, **kept})
            continue
        for name, there, live in list(differing(schedule.scheduler, saved)):
            winner, other = (live, there) if configured else (there, live)
            # Rates at the beginning are those of the groups.
            if name != "base_lrs":
                differed.append(f"{name} of schedule {number} is {winner[name]}, not {other[name]}")
            there[name] = winner[name]
    return differed


def _is_torchs(scheduler: Any) -> bool:
    return type(scheduler).__module__ == "torch.optim.lr_scheduler"


def differing(scheduler: Any, saved: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each setting of a torch scheduler, or one inside of it, that ``saved`` has not: name, saved and live state."""
    if _is_torchs(scheduler):
        yield from _differing(saved, scheduler.state_dict())


def _differing(saved: Any, live: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name in sorted((saved.keys() & live.keys()) - _PROGRESS):
        if name == "_schedulers":
            if len(saved[name]) == len(live[name]):
                for inner_saved, inner_live in zip(saved[name], live[name], strict=True):
                    yield from _differing(inner_saved, inner_live)
        elif saved[name] != live[name]:
            yield name, saved, live
