"""Steady steps read no value of the device, but for what is listed here with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import EMACallback
from lightning_shard.strategies.precision import ShardPrecision
from tests import stand_in
from tests.harness import run_distributed
from tests.models import TinyLM, Tokens, loader, quiet_trainer
from tests.strategies.engines import ENGINES, NORM
from tests.waits import OBJECTS, SYNCHRONIZE, InSteps

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


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from Tokens(64)


class Weighed(Quiet):
    """With weights of losses, and an average of its own beside Lightning's, of ``data``."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": (batch[0] > 0).sum()}

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 1:
            self.average = [p.data.clone() for p in self.parameters()]
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.lerp_(parameter.data, 0.1)


def reads(engine: str, precision: Any, more: bool = False) -> dict[str, int]:
    counted = InSteps(STEPS[0], STEPS[-1])
    callbacks = [EMACallback()] if more else []
    trainer = quiet_trainer(
        strategy=ENGINES[engine](**({"nonfinite": "raise", "log_grad_norm": True} if more else {})),
        plugins=[ShardPrecision(precision)],
        max_steps=STEPS[-1] + 2,
        callbacks=[counted, *callbacks],
        **NORM,
    )
    # One without a length has ranks agree before each batch.
    trainer.fit(Weighed() if more else Quiet(), DataLoader(Stream(), 4) if more else loader())
    return dict(counted.waits.found)


ZERO = ["zero_1", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload"]
MATRIX = [
    pytest.param(engine, precision, marks=() if (engine, precision) in DEFAULT else pytest.mark.matrix)
    for DEFAULT in [{("full", "16-mixed"), ("zero_2_offload", "bf16-mixed")}]
    for engine in ["ddp", "full", "offload", *ZERO]
    for precision in ["32-true", "bf16-mixed", "16-mixed"]
]


@pytest.mark.parametrize(("engine", "precision"), MATRIX)
def test_steady_steps_do_not_wait_for_the_device(engine: str, precision: str) -> None:
    for found in run_distributed(reads, 2, engine, precision):
        assert found.pop(SCALER, 0) == (len(STEPS) if precision == "16-mixed" else 0)
        if stand_in.chosen():
            allowed = ON_A_DEVICE.get(engine, {})
            assert {key: n for key, n in found.items() if n > len(STEPS) * allowed.get(key, 0)} == {}
        else:
            assert {key for key, n in found.items() if n} <= EVERYWHERE


# For the weights' sum, and for whether the losses and gradients of the step before were finite.
MORE = {
    "full": {SYNCHRONIZE: 2},
    # And for whether a step wrote to ``data``, in 16 bits on any rank.
    "zero_2": {SYNCHRONIZE: 2, "lightning_shard/engines/zero/written.py:_are_same": 1, OBJECTS: 1},
}


@pytest.mark.skipif(not stand_in.chosen(), reason="set TESTS_DEVICE=stand_in")
@pytest.mark.parametrize("engine", list(MORE))
def test_nor_do_those_that_average_weigh_and_look_for_inf(engine: str) -> None:
    for found in run_distributed(reads, 2, engine, "bf16-mixed", more=True):
        assert {key: n / len(STEPS) for key, n in found.items() if n} == MORE[engine]
