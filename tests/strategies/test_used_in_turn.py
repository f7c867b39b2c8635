"""Micro-batches of one step that use different parameters."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, data, same_everywhere


class InTurn(Indexed):
    """Every second batch uses a layer more, and none another."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.ones_(self.never.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(self.extra(hidden) if self.trainer.fit_loop.batch_idx % 2 else hidden).squeeze(-1)


def test_sums_of_a_step_that_is_reduced_once_begin_late() -> None:
    options = {"accumulate_sync": "boundary"}
    run = same_everywhere(
        InTurn, "bf16-mixed", strategies=("ddp", "full"), options=options, accumulate_grad_batches=2, max_epochs=2
    )
    assert run["steps"] > 3  # after which ranks do not tell each other any more what they use
    assert run["parameters"]["never.weight"].eq(1).all()  # no weight decay


def _refused(stage: int) -> str:
    strategy = ShardDeepSpeedStrategy(stage=stage, offload_optimizer={"device": "cpu"})
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(InTurn(), data())
    return str(error.value)


@pytest.mark.parametrize("stage", sampled([1, 2, 3], 2))
def test_sums_on_the_host_that_the_last_batch_does_not_add_to_are_refused(stage: int) -> None:
    for said in run_distributed(_refused, 2, stage):
        assert said.startswith(
            "Not all micro-batches of a step use extra.bias, extra.weight, but with the optimizer on"
        )
