"""Offload computes the same numbers where copies to the host are late, as on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_shard.engines.zero.config.fields import OptimizerOffload
from tests.groups import sampled
from tests.harness import run_distributed
from tests.late_copies import late_copies
from tests.models import TinyLM
from tests.strategies.engines import NORM, TWICE, differences
from tests.strategies.zero import Manual, fit

PINNED = {"offload_optimizer": OptimizerOffload(device="cpu", pin_memory=True)}


class Unclipped(Manual):
    """Steps by hand, and reads no gradient."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


CASES: dict[str, tuple[type[TinyLM], dict[str, Any], dict[str, Any]]] = {
    "clipped": (TinyLM, NORM, {}),
    "accumulated": (TinyLM, {**NORM, **TWICE}, {}),
    "manual": (Manual, {}, {"every": 2}),
    "manual_unclipped": (Unclipped, {}, {"every": 2}),
}


def fit_both(engine: str, precision: str, cases: list[str]) -> dict[str, dict[str, float]]:
    """By case what differs in a run whose copies are late."""
    found = {}
    for case in cases:
        kind, trainer, model = CASES[case]
        runs: list[dict[str, Tensor]] = []
        for late in (False, True):
            arguments = (engine, kind, precision, PINNED, {**trainer, "max_steps": 3})
            if late:
                with late_copies() as copies:
                    runs.append(fit(*arguments, **model)["parameters"])
                assert copies.late > 0
            else:
                runs.append(fit(*arguments, **model)["parameters"])
        found[case] = differences(*runs)
    return found


def check(engine: str, precision: str, cases: list[str]) -> None:
    for rank in run_distributed(fit_both, 2, engine, precision, cases, timeout=240):
        assert rank == {case: {} for case in cases}


@pytest.mark.parametrize(
    ("engine", "case"),
    sampled([("zero_2_offload", "clipped"), ("zero_3_offload_optimizer", "manual_unclipped")], 0),
)
def test_offloaded_gradients_are_waited_for(engine: str, case: str) -> None:
    check(engine, "bf16-mixed", [case])


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("engine", ["zero_1_offload", "zero_2_offload", "zero_3_offload_optimizer"])
def test_offloaded_gradients_are_waited_for_in_every_loop(engine: str, precision: str) -> None:
    check(engine, precision, list(CASES))
