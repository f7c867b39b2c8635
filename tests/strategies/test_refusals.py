"""What a training step may return, and what of optimizers, weights and units can't go together."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.fsdp import fully_shard

from lightning_shard import ConfigurationError, ShardPrecision
from lightning_shard.cluster.traces import package_of
from lightning_shard.registry import build
from lightning_shard.strategies.refusals import explain_error, refuse_loss
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, data, refusal


@pytest.mark.parametrize("output", [None, {"loss": None}])
def test_none_is_a_batch_left_out_in_one_process_alone(output: Any) -> None:
    module = BoringModel()
    module.trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    refuse_loss(output, module)
    module.trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    with pytest.raises(
        ConfigurationError, match=r"training_step returned .*None.*a weight of 0.*boring_classes\.py:\d+"
    ):
        refuse_loss(output, module)


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
    with pytest.raises(ConfigurationError, match="Run a batch through the model in configure_model") as raised:
        trainer.fit(Lazy())
    packages = [package_of(frame) for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    assert packages == ["tests", "lightning"], "the user's line, and Trainer.fit"


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
    explain_error(caught.value, None, all_frames=False)
    assert "buffers and tensors that forward makes are not" in str(caught.value)


class Lbfgs(Indexed):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WeighsLbfgs(Lbfgs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": 1}


class ByHand(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Sharpness(torch.optim.SGD):
    """Steps by the gradient at a distance from each tensor that its own norm decides."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        tensors = [p for group in self.param_groups for p in group["params"]]
        moves = [p.grad / p.grad.norm() for p in tensors]
        with torch.no_grad():
            torch._foreach_add_(tensors, moves)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(tensors, moves)
        super().step()
        return loss


class Sharp(Indexed):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters(), 0.1)


class MadeEarly(torch.optim.Adafactor):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = torch.zeros_like(parameter)


class Early(Indexed):
    def configure_optimizers(self) -> Any:
        return MadeEarly(self.parameters())


class ThawsFull(Indexed):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body.requires_grad_(batch_idx > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Sharded(Indexed):
    def configure_model(self) -> None:
        fully_shard(self.body, mesh=self.device_mesh["shard"])  # type: ignore[index]


BF16 = {"modules": ["Linear"], "compute": "bf16"}
AUTOCAST = {"precision": "bf16-mixed", "autocast": True}
REFUSED: list[tuple[type[Indexed], str, dict[str, Any], dict[str, Any], str]] = [
    (Lbfgs, "shard_ddp", {"nonfinite": "skip"}, {}, "nonfinite is set, which may skip steps, but LBFGS computes"),
    (WeighsLbfgs, "shard_ddp", {}, {}, "LBFGS computes the loss again in its step, but steps are taken after"),
    (ByHand, "shard_ddp", {"loss_weight_key": "0"}, {}, "loss_weight_key is '0', but ByHand runs backward and steps"),
    (Sharp, "shard_fsdp", {}, {}, "Sharpness needs full parameters and a closure that computes the loss again"),
    (Early, "shard_fsdp", {}, {}, "MadeEarly makes its state in its constructor, but is stepped on full"),
    (ThawsFull, "shard_fsdp", {}, {}, "but Adafactor steps full parameters at owners that were chosen then"),
    (Indexed, "shard_fsdp", {"units": [BF16]}, AUTOCAST, "units have a compute dtype under autocast"),
    (
        Sharded,
        "shard_fsdp",
        {"units": [{**BF16, "compute": "fp32"}]},
        {},
        "units has entries with settings of their own",
    ),
]


def _refusals() -> list[str]:
    wrong = []
    for kind, strategy, options, precision, said in REFUSED:
        plugins = [ShardPrecision(**precision)] if precision else []

        def fit(kind: Any = kind, strategy: Any = strategy, options: Any = options, plugins: Any = plugins) -> None:
            quiet_trainer(strategy=build(strategy, **options), plugins=plugins, max_steps=2).fit(kind(), data(count=8))

        error, message = refusal(fit)
        if said not in message:
            wrong.append(f"{kind.__name__}: {error}: {message}")
    return wrong


def test_what_can_not_go_together_is_refused() -> None:
    assert run_distributed(_refusals, 2) == [[], []]
