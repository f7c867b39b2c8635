"""Losses, optimizers, units and changes of the model in hooks that can't be: refused in a sentence."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from lightning_shard import ConfigurationError, ShardPrecision
from lightning_shard.cluster.traces import package_of
from lightning_shard.registry import build
from lightning_shard.strategies.refusals import explain_error, refuse_loss
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, data, refusal


def test_none_is_a_batch_left_out_in_one_process_alone() -> None:
    module = BoringModel()
    module.trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    refuse_loss(None, module)
    module.trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"training_step returned .*None.*a weight of 0"):
        refuse_loss({"loss": None}, module)


class Double(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer.double()


def test_double_parameters_are_refused_in_a_sentence() -> None:
    trainer = Trainer(strategy="shard_fsdp", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"are fp64, but .* Call \.float\(\) on the module") as raised:
        trainer.fit(Double())
    packages = [package_of(frame) for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    assert packages == ["tests", "lightning"], "the user's line, and Trainer.fit"


@pytest.mark.parametrize(
    "compute",
    [
        lambda half, full: half @ full,
        lambda half, full: torch.nn.functional.scaled_dot_product_attention(half, full, full),
        lambda half, full: torch.nn.LSTM(2, 2)(half),
        lambda half, full: torch.fft.rfft(half),
    ],
    ids=["mm", "attention", "lstm", "fft"],
)
def test_dtypes_that_do_not_meet_are_told_what_is_cast(compute: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        compute(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2))
    explain_error(caught.value, None, all_frames=False)
    assert "buffers and tensors that forward makes are not" in str(caught.value)


class Lbfgs(Indexed):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


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
    (ByHand, "shard_ddp", {"loss_weight_key": "0"}, {}, "loss_weight_key is '0', but ByHand runs backward and steps"),
    (Sharp, "shard_fsdp", {}, {}, "Sharpness needs full parameters and a closure that computes the loss again"),
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


class Changes(Indexed):
    """The optimizer begins with the head alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


class AddsGroup(Changes):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": list(self.body.parameters())})  # type: ignore[union-attr]


class Replaces(Changes):
    def on_train_start(self) -> None:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesInSteps(Changes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)
        return super().training_step(batch, batch_idx)


class Prunes(Changes):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            prune.identity(self.head, "weight")


GROUP, NEW = "add_param_group is called in a fit", "head.weight, head.bias came after the model was set up"
CHANGES: list[tuple[str, type[Indexed], str]] = [
    ("shard_deepspeed_stage_1", AddsGroup, GROUP),
    ("shard_fsdp", Replaces, NEW),
    ("shard_fsdp", Prunes, "torch.nn.utils.prune's if it is applied after the model was set up to train. Apply"),
    ("shard_deepspeed_stage_3", AddsGroup, GROUP),
    ("shard_ddp", Replaces, NEW),
    ("shard_deepspeed_stage_1", Replaces, NEW),
    ("shard_deepspeed_stage_2", ReplacesInSteps, NEW),
    ("shard_deepspeed_stage_2", Prunes, "head.weight (head.weight_orig now) got other names after the model was set"),
]


def _refused_changes(cases: list[tuple[str, type[Indexed], str]]) -> list[str]:
    wrong = []
    for strategy, kind, said in cases:
        trainer = quiet_trainer(strategy=strategy, max_steps=6, num_sanity_val_steps=1)
        error, message = refusal(trainer.fit, kind(), data(count=8), data(count=8))
        if said not in message or error != "ConfigurationError":
            wrong.append(f"{strategy}, {kind.__name__}: {error}: {message}")
    return wrong


@pytest.mark.parametrize(("ranks", "cases"), sampled([(1, CHANGES[:4]), (2, CHANGES)], 0), ids=["one process", "all"])
def test_they_are_refused_on_all_ranks(ranks: int, cases: list[Any]) -> None:
    assert run_distributed(_refused_changes, ranks, cases) == [[]] * ranks
