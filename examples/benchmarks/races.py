"""Races from outside: started in new processes, and made into rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from examples.benchmarks.processes import Failed, Team
from examples.benchmarks.turns import Contestant, Plan, Result, Spread, build, difference, paired, serve, spread
from examples.benchmarks.workload import Workload

Maker = Callable[..., Contestant]

OTHERS = ("lightning_", "accelerate_")

TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 2e-2}
"""Largest relative difference of a loss from the reference's. fp32 sums in another order differ by 1e-7 in the first
step, and bf16 ones by 1e-3. Training amplifies it, step by step."""


def time_together(names: Sequence[str], work: Workload, plan: Plan, make: Maker = build) -> Result:
    """Race ``names``, each in new processes of its own, that stand still while others run: a block of steps each, every
    second round backwards. Patches of one for its whole process slow no other down.
    """
    result = Result()
    teams: dict[str, Team] = {}

    def told(name: str, say: Callable[[Team], list[Any]]) -> list[Any] | None:
        try:
            return say(teams[name])
        except Failed as error:
            result.left_out[name] = str(error)
            result.seconds.pop(name, None)
            teams.pop(name).end()
            return None

    try:
        for name in names:
            teams[name] = Team(serve, name, work, plan, make, processes=work.processes, device=work.device)
            whys = told(name, lambda team: team.hear(seconds=plan.seconds_left))
            if whys is not None and whys[0] is not None:
                result.left_out[name] = whys[0]
                teams.pop(name).end()
            elif whys is not None:
                result.seconds[name] = []
        for index in range(plan.rounds):
            for name in list(teams)[:: -1 if index % 2 else 1]:
                if seconds := told(name, lambda team: team.ask(plan.steps, seconds=plan.seconds_left)):
                    result.seconds[name].append(max(seconds))
        for name in list(teams):
            if (losses := told(name, lambda team: team.ask(0, seconds=plan.seconds_left))) is not None:
                result.losses[name] = [loss for rank in losses for loss in rank]
    finally:
        for team in teams.values():
            team.end(seconds=30.0)
    return result


def time_one_by_one(names: Sequence[str], work: Workload, plan: Plan, make: Maker = build) -> Result:
    """As `time_together`, but one after the other, for models that leave no room for others."""
    result = Result()
    for name in names:
        one = time_together([name], work, plan, make)
        result.seconds |= one.seconds
        result.losses |= one.losses
        result.left_out |= one.left_out
    return result


def rows_of(race_name: str, result: Result, work: Workload, reference_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """A row for each contestant that ran, ``failed`` if its losses are not its reference's."""
    rows = []
    for name, seconds in result.seconds.items():
        own, reference = spread(seconds), reference_of(name)
        row: dict[str, Any] = {
            "race": race_name,
            "contestant": name,
            "ms": round(1e3 * own.median, 1),
            "quartiles": f"{1e3 * own.low:.1f}..{1e3 * own.high:.1f}",
            "tokens": round(work.tokens / own.median),
        }
        if reference in result.seconds:
            row["loss"] = difference(result.losses[name], result.losses[reference])
            row["failed"] = not row["loss"] <= TOLERANCE[work.precision]
            ratio = paired(seconds, result.seconds[reference])
            row.update({"ratios": "losses differ"} if row["failed"] else ratios(ratio))
        rows.append(row)
    return rows


def ratios(found: Spread, key: str = "ratio") -> dict[str, Any]:
    """The columns of paired ratios: the median, its interval, which is also a text, and the extremes."""
    low, high = found.interval
    return {
        key: round(found.median, 4),
        f"{key}_low": round(low, 4),
        f"{key}_high": round(high, 4),
        f"{key}_smallest": round(found.smallest, 4),
        f"{key}_largest": round(found.largest, 4),
        f"{key}s": f"{low:.3f}..{high:.3f}",
    }


def compare_with_others(rows: Sequence[dict[str, Any]], result: Result) -> None:
    """Put into this package's rows which of the other packages was fastest, and the paired ratios to it."""
    others = [row for row in rows if row["contestant"].startswith(OTHERS) and not row.get("failed", True)]
    if not others:
        return
    fastest = min(others, key=lambda row: row["ratio"])["contestant"]
    for row in rows:
        if row["contestant"].startswith("shard_"):
            found = paired(result.seconds[row["contestant"]], result.seconds[fastest])
            row.update(other=fastest, **ratios(found, "other_ratio"))


def rounds_of(race_name: str, result: Result) -> list[dict[str, Any]]:
    """A row for each block."""
    return [
        {"race": race_name, "contestant": name, "round": index, "seconds_per_step": seconds}
        for name, blocks in result.seconds.items()
        for index, seconds in enumerate(blocks)
    ]


def contestants(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Whom there is a row of."""
    return {row["contestant"] for row in rows}


def say(line: str) -> None:
    """Tell now, in the middle of a long run."""
    print(line, flush=True)
