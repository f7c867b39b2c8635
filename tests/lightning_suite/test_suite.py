"""What Lightning's own tests ask of strategies, checkpoints, optimizers and callbacks, asked of this package's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed
from tests.lightning_suite import checkpoints, features, hooks, loops
from tests.lightning_suite.stock import STRATEGIES, Case, check, differences, refused

ZERO = STRATEGIES[2]
# Case, strategies that refuse it, the error, and what it says.
REFUSED: list[tuple[Case, list[str], str, str]] = [
    (hooks.toggled_without_a_word, STRATEGIES[:1], "ConfigurationError", "does not depend on head.weight, head.bias"),
]
QUICK = {
    (hooks.of_a_fit_by_hand, ZERO),
    (hooks.overridden_backward, ZERO),
    (checkpoints.several, STRATEGIES[1]),
    (features.values, STRATEGIES[0]),
    (hooks.toggled_without_a_word, STRATEGIES[0]),
}


def _marked(case: Case, strategy: str, *more: Any) -> Any:
    marks = [] if (case, strategy) in QUICK else [pytest.mark.matrix]
    return pytest.param(case, strategy, *more, marks=marks, id=f"{case.__name__}-{strategy}")


def _equal(cases: list[Case]) -> Any:
    every = [(case, strategy) for case in cases for strategy in STRATEGIES]
    return pytest.mark.parametrize(("case", "strategy"), [_marked(*each) for each in every])


@_equal(hooks.CASES)
def test_hooks(case: Case, strategy: str) -> None:
    check(case, strategy)


@_equal(checkpoints.CASES)
def test_checkpoints(case: Case, strategy: str) -> None:
    check(case, strategy)


@_equal(loops.CASES)
def test_loops(case: Case, strategy: str) -> None:
    check(case, strategy)


@_equal(features.CASES)
def test_logging_and_optimizers(case: Case, strategy: str) -> None:
    check(case, strategy)


@pytest.mark.parametrize(
    ("case", "strategy", "error", "said"),
    [_marked(case, each, *what) for case, strategies, *what in REFUSED for each in strategies],
)
def test_refused(case: Case, strategy: str, error: str, said: str) -> None:
    for kind, message in run_distributed(refused, 2, case, strategy):
        assert kind == error, message
        assert said in message


@pytest.mark.parametrize(
    ("found", "count"), [({"a": [1.0 + 1e-7, "x"]}, 0), ({"a": [1.001, "x"]}, 1), ({"a": [1.0]}, 1), ({}, 1)]
)
def test_a_difference_is_found(found: Any, count: int) -> None:
    assert len(differences(found, {"a": [1.0, "x"]})) == count
