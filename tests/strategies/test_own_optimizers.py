"""Optimizers that do more than step: they write between steps, and keep state that is no parameter's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.everywhere import same_everywhere
from tests.strategies.indexed import PRECISIONS, Indexed


class Averaging(torch.optim.SGD):
    """As ScheduleFree has other values for evaluation, and as MADGRAD counts its steps in its state."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        return super().step(closure)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


class Scaled(Indexed):
    def configure_optimizers(self) -> Any:
        return Averaging(self.parameters(), lr=0.05)

    def _scale(self, factor: float) -> None:
        optimizer: Any = self.optimizers()
        getattr(optimizer, "optimizer", optimizer).scale(factor)

    def on_validation_start(self) -> None:
        self._scale(0.5)

    def on_validation_end(self) -> None:
        self._scale(2.0)


@pytest.mark.matrix
@PRECISIONS
def test_what_an_optimizer_writes_outside_of_its_step_is_seen(precision: str) -> None:
    same_everywhere(Scaled, precision, strategies=("ddp", "full", "zero_2"))
