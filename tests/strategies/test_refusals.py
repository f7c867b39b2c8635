"""What a training step may return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import ConfigurationError
from lightning_shard.strategies.refusals import explain, refuse_loss


@pytest.mark.parametrize("output", [None, {"loss": None}])
def test_none_is_a_batch_left_out_in_one_process_alone(output: Any) -> None:
    module = BoringModel()
    module.trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    refuse_loss(output, module)
    module.trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"training_step returned None.*a weight of 0.*boring_classes\.py:\d+"):
        refuse_loss(output, module)


def test_a_loss_of_frozen_parameters_is_told_so() -> None:
    module = BoringModel().requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"returned a loss of frozen parameters alone.*require a gradient"):
        refuse_loss(module.layer(torch.ones(32)).sum(), module)


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_lightning_refuses_a_module_that_is_compiled_as_a_whole(call: str) -> None:
    trainer = Trainer(strategy="shard_fsdp", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    compiled = torch.compile(BoringModel(), backend="eager")
    with pytest.raises(RuntimeError, match="a compiled model is incompatible with the current strategy: `ShardFSDP"):
        getattr(trainer, call)(compiled)


class Lazy(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(2)


@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1"])
def test_lazy_parameters_are_refused_in_a_sentence(name: str) -> None:
    trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match="Run a batch through the model in configure_model"):
        trainer.fit(Lazy())


@pytest.mark.parametrize(
    "compute",
    [
        lambda half, full: half @ full,
        lambda half, full: half[None] @ full[None],
        lambda half, full: half @ full[0],
        lambda half, full: torch.nn.functional.scaled_dot_product_attention(half, full, full),
        lambda half, full: torch.nn.LSTM(2, 2)(half),
        lambda half, full: torch.cdist(half, half),
        lambda half, full: torch.fft.rfft(half),
    ],
    ids=["mm", "bmm", "mv", "attention", "lstm", "cdist", "fft"],
)
def test_dtypes_that_do_not_meet_are_told_what_is_cast(compute: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        compute(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2))
    explain(caught.value, None)
    assert "buffers and tensors that forward makes are not" in str(caught.value)
