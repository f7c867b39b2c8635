"""Two ranks, as threads, that use the same or other modules and parameters in a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.engines import parameter_use
from lightning_shard.engines.module_checks import DifferentUse
from lightning_shard.engines.parameter_use import TRAINING, ParameterUse

SECONDS = 5.0


class Rank:
    """One of two, with the methods of `Ranks` that are asked."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[Any]) -> None:
        self.rank, self._barrier, self._given, self.exchanges = rank, barrier, given, 0

    def gather(self, value: Any, timeout: float = SECONDS) -> list[Any]:
        self._given[self.rank] = value
        try:
            self._barrier.wait(timeout)
            everywhere = list(self._given)
            self._barrier.wait(timeout)
        except threading.BrokenBarrierError:
            raise RuntimeError("timed out") from None
        return everywhere

    def same(self, digest: bytes, timeout: timedelta | None = None) -> bool:
        self.exchanges += 1
        return len({*self.gather(digest, SECONDS if timeout is None else timeout.total_seconds())}) == 1


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Rank], Any]], list[Any]]:
    """Runs a function as both ranks; what it returns or raises on each."""
    local, barrier, given = threading.local(), threading.Barrier(2), [None, None]
    monkeypatch.setattr(parameter_use.Ranks, "of", lambda: local.rank)
    monkeypatch.setattr(parameter_use, "_WAIT", timedelta(seconds=0.2))

    def as_rank(function: Callable[[Rank], Any], number: int) -> Any:
        local.rank = Rank(number, barrier, given)
        try:
            return function(local.rank)
        except DifferentUse as error:
            return str(error)

    def run(function: Callable[[Rank], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(as_rank, [function] * 2, range(2)))

    return run


class Steps:
    """A rank's steps over modules by name, each with a parameter that it uses."""

    def __init__(self, rank: Rank, *, always: bool = False) -> None:
        self.rank, self.modules = rank, {name: nn.Linear(1, 1, bias=False) for name in ("stem", "one", "other", "head")}
        self.use = ParameterUse(self.modules.items())
        self.use.compare_parameters(self.modules, always=always)

    def run(self, *names: str, kind: str = TRAINING) -> int:
        """A step, after which the exchanges so far are returned."""
        with self.use.watch_forward(kind):
            for name in names:
                self.modules[name](torch.ones(1))
                self.use.used_in_step[name] = None
        self.unused = self.use.finish_step() if kind == TRAINING else None
        return self.rank.exchanges


ALL = ("stem", "one", "other", "head")


def test_a_steady_step_exchanges_nothing(two: Any) -> None:
    # Each module and the end once, and a comparison of parameters in the first three steps.
    assert two(lambda rank: [Steps(rank).run(*ALL) for _ in [0]]) == [[6], [6]]

    def steps(rank: Rank) -> list[int]:
        own = Steps(rank)
        return [own.run(*ALL) for _ in range(5)] + [own.run(*ALL, kind="evaluation"), own.run(*ALL)]

    assert two(steps) == [[6, 7, 8, 8, 8, 13, 13]] * 2


@pytest.mark.parametrize("before", [0, 1])
def test_other_modules_in_the_first_steps_end_both(two: Any, before: int) -> None:
    def steps(rank: Rank) -> None:
        own = Steps(rank)
        for step in range(before):
            own.run("stem", ("one", "other")[step % 2], "head")
        own.run("stem", "one" if rank.rank else "other", "head")

    # One that goes on as before is met at the end of its step, if nothing else holds it.
    where = "is at the end of the step" if before == 1 else "runs one"
    for told in two(steps):
        assert told.startswith(f"Ranks take different branches: rank 0 runs other, rank 1 {where}.")


def test_a_rank_that_leaves_a_module_out_late_is_told_at_once(two: Any) -> None:
    def steps(rank: Rank) -> int:
        own = Steps(rank)
        for _ in range(3):
            own.run(*ALL)
        return own.run(*(("stem", "one", "head") if rank.rank == 0 else ALL))

    told, exchanges = two(steps)
    assert told.startswith("This step runs head where each step before runs other")
    assert "find_unused_parameters: true" in told
    assert exchanges == 8


def test_a_rank_that_takes_a_new_branch_alone_is_told_after_a_wait(two: Any) -> None:
    def steps(rank: Rank) -> int:
        own = Steps(rank)
        own.run(*ALL, kind="evaluation")
        return own.run(*("stem", "head") if rank.rank == 0 else ALL, kind="evaluation")

    told, _ = two(steps)
    assert told.startswith("Ranks take different branches: rank 0 runs head, where each step before runs one")


def test_branches_that_all_take_late_are_followed_on_request(two: Any) -> None:
    def steps(rank: Rank) -> list[Any]:
        own = Steps(rank, always=True)
        unused = []
        for names in [ALL] * 4 + [("stem", "one", "head"), ALL]:
            own.run(*names)
            unused.append(sorted(own.unused or ()))
        return unused

    assert two(steps) == [[[]] * 4 + [["other"]] + [[]]] * 2
