"""Lightning's callbacks that freeze and thaw, on every engine: they work, or say why not."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
)
from torch import Tensor, nn

from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole
from tests.optimizers import Lamb
from tests.strategies.indexed import BOTH, PRECISIONS, Indexed, data, refusal

# Freezing and unfreezing


class Scale(nn.Module):
    """Its parameter has no dimension, so that FSDP leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Backbone(Indexed):
    """`BackboneFinetuning` wants the part to be thawed under this name; its blocks are shard units."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()
        sizes = [3, 8, 8, 8]
        blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
        self.backbone = nn.Sequential(*blocks, Scale())
        self.epochs: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)).squeeze(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def on_train_epoch_end(self) -> None:
        self.epochs.append({n: whole(p) for n, p in self.named_parameters()})


class Refreezing(BaseFinetuning):
    """The head alone, then all, then the body alone."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)
        if epoch == 2:
            pl_module.head.requires_grad_(False)


def _finetuned(precision: str, kind: str, strategies: list[str]) -> dict[str, Any]:
    runs = {}
    for strategy in strategies:
        pl.seed_everything(1, verbose=False)
        module = Backbone()
        callback = Refreezing() if kind == "refreeze" else BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=3, callbacks=[callback])
        trainer.fit(module, data(), data())
        runs[strategy] = module.epochs
    return runs


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sampled(["backbone", "refreeze"], 0))
@PRECISIONS
def test_freezing_and_thawing_between_epochs(precision: str, kind: str) -> None:
    strategies = ["shard_ddp", "shard_fsdp", "shard_fsdp_grad_op", "shard_fsdp_offload"]
    ranks = run_distributed(_finetuned, 2, precision, kind, strategies)
    first = ranks[0]["shard_fsdp"]
    for rank, strategy in itertools.product(range(2), strategies):
        for epoch, parameters in enumerate(ranks[rank][strategy]):
            for name, value in first[epoch].items():
                assert torch.equal(parameters[name], value), (rank, strategy, epoch, name)
    torch.manual_seed(1)
    start = {name: p.detach() for name, p in Backbone().named_parameters()}
    moved = [
        {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        for before, after in itertools.pairwise([start, *first])
    ]
    assert moved == [{"head"}, {"backbone", "head"}, {"backbone"} if kind == "refreeze" else {"backbone", "head"}]


class Moments(Backbone):
    def configure_optimizers(self) -> Any:
        return Lamb([p for p in self.parameters() if p.requires_grad])


def _finetunes(strategy: str, kind: type[Backbone]) -> None:
    quiet_trainer(strategy=strategy, max_epochs=2, callbacks=[Refreezing()]).fit(kind(), data())


@pytest.mark.parametrize(
    ("strategy", "kind", "said"),
    [
        ("shard_deepspeed_stage_1", Backbone, "Refreezing freezes and thaws parameters, but ShardDeepSpeedStrategy"),
        ("shard_fsdp", Moments, "add_param_group is called in a fit, but ShardFSDPStrategy steps"),
    ],
)
def test_thawing_where_an_engine_can_not_follow_is_refused(strategy: str, kind: type[Backbone], said: str) -> None:
    for error, message in run_distributed(refusal, 2, _finetunes, strategy, kind):
        assert error == "ConfigurationError"
        assert said in message


class Thawed(Refreezing):
    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.backbone.to(torch.bfloat16)
        super().freeze_before_training(pl_module)


def _thawed(strategy: str) -> None:
    quiet_trainer(strategy=strategy, precision="bf16-mixed", max_epochs=2, callbacks=[Thawed()]).fit(Backbone(), data())


@BOTH
def test_thawing_what_has_no_master_is_refused(strategy: str) -> None:
    for error, message in run_distributed(refusal, 2, _thawed, strategy):
        assert error == "ConfigurationError"
        assert "7 parameters were thawed that were frozen in torch.bfloat16 when the fit began" in message


class FreezingInside(Backbone):
    """Freezes a part between two micro-batches of a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone[0].requires_grad_(batch_idx % 2 == 0)


def _frozen_inside(strategies: list[str]) -> list[dict[str, Tensor]]:
    runs = []
    for strategy in strategies:
        pl.seed_everything(1, verbose=False)
        module = FreezingInside()
        own = build(strategy, accumulate_sync="boundary")
        quiet_trainer(strategy=own, max_epochs=1, accumulate_grad_batches=2).fit(module, data())
        runs.append(module.epochs[0])
    return runs


def test_what_is_frozen_inside_of_a_step_keeps_the_gradients_of_its_earlier_micro_batches() -> None:
    for first, second in run_distributed(_frozen_inside, 2, ["shard_ddp", "shard_fsdp"]):
        assert [name for name in first if not torch.equal(first[name], second[name])] == []
