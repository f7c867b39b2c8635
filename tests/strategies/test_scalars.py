"""0-d parameters stay in fp32 wherever they are read, on every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.errors import ConfigurationError
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.everywhere import same_everywhere
from tests.strategies.indexed import Indexed, data


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
        self.frozen = nn.Parameter(torch.tensor(1.01), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        read = (self.named["b"], self.never.scale, self.never.listed[0], self.gated.gates["a"], self.frozen)
        assert {scalar.dtype for scalar in read} == {torch.float32}
        x = checkpoint(self.gated, x, use_reentrant=False) * self.frozen
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


class Clamped(ReadElsewhere):
    """As CLIP's ``logit_scale`` often is."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.never.scale.data.clamp_(max=0.1)


def _refused() -> list[str]:
    found = []
    for stage in (2, 3):
        strategy = ShardDeepSpeedStrategy(stage=stage, hooks_use_accessor=True)
        trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=4)
        with pytest.raises(ConfigurationError) as error:
            trainer.fit(Clamped(), data(shuffle=True))
        found.append(str(error.value))
    return found


def test_what_zero_would_lose_of_a_scalar_is_refused() -> None:
    for messages in run_distributed(_refused, 2):
        assert all("never.scale" in message and "set_full_tensor" in message for message in messages), messages
