"""0-d parameters, which FSDP does not shard, are seen in the compute dtype wherever they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.everywhere import same_everywhere
from tests.strategies.indexed import Indexed


class Never(nn.Module):
    """Has parameters for others to read, and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.73))
        self.listed = nn.ParameterList([nn.Parameter(torch.tensor(0.31))])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gates = nn.Linear(3, 3), nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.57))})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gates["a"].exp()


class ReadElsewhere(Indexed):
    """By the LightningModule, by a module around them, and in the recomputation of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.never = Gated(), Never()
        self.named = nn.ParameterDict({"b": nn.Parameter(torch.tensor(0.37))})

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.gated, x, use_reentrant=False)
        return super().forward(x) * (-self.named["b"]).exp() * self.never.scale + self.never.listed[0]


class SteppedTwice(ReadElsewhere):
    """A step goes on with the values that the optimizer has left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, "train"))
            optimizer.step()


@pytest.mark.parametrize("kind", [ReadElsewhere, pytest.param(SteppedTwice, marks=pytest.mark.matrix)])
def test_where_scalars_are_read_makes_no_difference(kind: Any) -> None:
    same_everywhere(kind, "bf16-mixed", strategies=("ddp", "full", "zero_2", "zero_3"))
