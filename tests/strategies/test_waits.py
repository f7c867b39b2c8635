"""Steady steps read no value of the device, but for what is listed here with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_shard.strategies.precision import ShardPrecision
from tests import stand_in
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, NORM
from tests.waits import SYNCHRONIZE, InSteps

STEPS = range(5, 8)  # in the first ones ranks compare what they run, and replicas
EVERYWHERE = {
    # A tensor of one integer on the host, which ranks that are to be stopped have agreed on.
    "lightning_shard/cluster/preemption.py:wait_for_largest",
    # The optimizer's count of steps, which torch keeps on the host.
    "lightning/pytorch/plugins/precision/precision.py:optimizer_step",
    "lightning_shard/engines/torch_optimizer_engine.py:step_optimizer",
    "deepspeed/runtime/bf16_optimizer.py:step",
    "deepspeed/runtime/zero/stage_1_and_2.py:_optimizer_step",
    "deepspeed/runtime/zero/stage3.py:step_with_gradscaler",
    # A zero on the host in place of the norm; ZeRO-1 in bf16 alone moves it to the device and back.
    "deepspeed/runtime/utils.py:is_invalid_grad_norm",
    # A digest on the host, in the first three steps that fp16 does not skip.
    "lightning_shard/ranks.py:same",
}
# Whether a step overflowed, in fp16: once in a step.
SCALER = "lightning_shard/precision/loss_scale.py:unscale_gradients"
NORM_ON_HOST = {"lightning_shard/tensors/clipping.py:gradient_norm": 1}  # all-reduced on the device
ON_A_DEVICE: dict[str, dict[str, int]] = {
    "offload": {
        **NORM_ON_HOST,
        SYNCHRONIZE: 21,  # torch's, for each gradient that is to be on the host
    },
    # DeepSpeed's own.
    "zero_1": {"deepspeed/runtime/utils.py:get_global_norm_of_tensors": 2},
    "zero_3": {SYNCHRONIZE: 2},
    # Whether a step overflowed waits for the copies to the host; clipping and DeepSpeed find them done.
    "zero_2_offload": {**NORM_ON_HOST, SYNCHRONIZE: 3},
    "zero_3_offload": {
        **NORM_ON_HOST,
        "deepspeed/runtime/zero/partition_parameters.py:_allgather_params_coalesced": 22,  # what stays gathered
        SYNCHRONIZE: 5,
    },
}
"""Waits of a step that a stand-in for a GPU counts, which knows what lies on the host."""


class Quiet(TinyLM):
    """Reads nothing itself."""

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        assert isinstance(value, Tensor), f"Lightning copies {name} to the device, and waits for it"
        super().log(name, value, **kwargs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


def reads(engine: str, precision: Any) -> dict[str, int]:
    counted = InSteps(STEPS[0], STEPS[-1])
    plugins, steps = [ShardPrecision(precision)], STEPS[-1] + 2
    trainer = quiet_trainer(strategy=ENGINES[engine](), plugins=plugins, max_steps=steps, callbacks=[counted], **NORM)
    trainer.fit(Quiet(), loader())
    return dict(counted.waits.found)


ZERO = ["zero_1", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload"]
CASES = [
    (engine, precision)
    for engine in ["ddp", "full", "offload", *ZERO]
    for precision in ["32-true", "bf16-mixed", "16-mixed"]
]


@pytest.mark.parametrize(
    ("engine", "precision"),
    sampled(CASES, CASES.index(("full", "16-mixed")), CASES.index(("zero_2_offload", "bf16-mixed"))),
)
def test_steady_steps_do_not_wait_for_the_device(engine: str, precision: str) -> None:
    for found in run_distributed(reads, 2, engine, precision):
        assert found.pop(SCALER, 0) == (len(STEPS) if precision == "16-mixed" else 0)
        if stand_in.chosen():
            allowed = ON_A_DEVICE.get(engine, {})
            assert {key: n for key, n in found.items() if n > len(STEPS) * allowed.get(key, 0)} == {}
        else:
            assert {key for key, n in found.items() if n} <= EVERYWHERE
