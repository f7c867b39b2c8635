"""Uses of gradients are looked at while an engine of stages 1 to 3 is there."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from lightning_shard.engines.zero.gradients import GradientUses


def test_engines_end_in_any_order() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    dropped: list[str] = []
    stacks = ExitStack(), ExitStack()
    for name, parameter, stack in (("first", first, stacks[0]), ("second", second, stacks[1])):
        stack.enter_context(GradientUses("a strategy", {parameter: name}, [], dropped.append).watched())
    stacks[0].close()
    second.grad = None
    first.grad = torch.ones(2)  # nobody's any more
    stacks[1].close()
    assert dropped == ["second"]
    assert "grad" not in vars(nn.Parameter)
    assert torch.equal(first.grad, torch.ones(2))
