"""Optimizers that look at full parameters only later in a run need full ones from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from tests.engines.test_optimizer_probe import parameters, probed


class Later(optim.SGD):
    """Scales rows by what it has summed of them, from step 1,000 on, as preconditioners do."""

    class Sums:
        rows: Any = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            steps = self.state[p].setdefault("step", 0) + 1
            sums = self.state[p].setdefault("sums", self.Sums())
            sums.rows = sums.rows + p.grad.sum(-1, keepdim=True)
            if steps > 1000:
                p /= 1 + sums.rows
            self.state[p]["step"] = steps


class Warming(optim.SGD):
    """Divides by the norm of a parameter from its 20th step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            if self.state[p]["step"] > 20:
                p /= p.norm()


@pytest.mark.parametrize("make", [Later, Warming])
def test_what_needs_full_parameters_later_has_them_from_the_start(make: Any) -> None:
    assert probed(make(parameters()))
