"""What hooks change after the model was sharded: followed as under DDP, or refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import Optimizer

from lightning_shard import full_tensor
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, data, refusal


class Changes(Indexed):
    """The optimizer begins with the head alone."""

    optimizer: Callable[..., Optimizer] = torch.optim.AdamW

    def configure_optimizers(self) -> Any:
        return type(self).optimizer(self.head.parameters(), lr=1e-2)


class AddsGroup(Changes):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": list(self.body.parameters())})  # type: ignore[union-attr]


class AddsGroupToFull(AddsGroup):
    optimizer = torch.optim.Adafactor


class Replaces(Changes):
    def on_train_start(self) -> None:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesLater(Changes):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesBetweenValidations(Changes):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 1:
            self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesBeforeValidation(Changes):
    def on_fit_start(self) -> None:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesInSteps(Changes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)
        return super().training_step(batch, batch_idx)


class Copies(Changes):
    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self)


class Prunes(Changes):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            prune.identity(self.head, "weight")


GROUP, NEW = "add_param_group is called in a fit", "head.weight, head.bias came after the model was set up"


class Clips(Indexed):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.01, 0.01)


class Pruned(Clips):
    def __init__(self) -> None:
        super().__init__()
        prune.identity(self.body[0], "weight")

    def on_train_end(self) -> None:
        prune.remove(self.body[0], "weight")


def _clipped(strategy: str) -> tuple[float, float]:
    """The largest weight as the fit leaves the module, and as it would be saved."""
    module, trainer = Pruned(), quiet_trainer(strategy=strategy, max_steps=2)
    trainer.fit(module, data(count=8))
    assert {"body.0.weight", "body.0.bias"} < dict(module.named_parameters()).keys()
    return module.head.weight.abs().max().item(), full_tensor(trainer, "head.weight").abs().max().item()


def test_what_a_hook_writes_after_the_last_step_stays() -> None:
    assert run_distributed(_clipped, 1, "shard_ddp") == [(pytest.approx(0.01),) * 2]


CASES: list[tuple[str, type[Indexed], str]] = [
    (
        "shard_deepspeed_stage_2",
        Clips,
        "Written to by no optimizer (such as by clamp_, or through parameter.data): head.w",
    ),
    ("shard_deepspeed_stage_1", AddsGroup, GROUP),
    ("shard_deepspeed_stage_3", AddsGroup, GROUP),
    ("shard_fsdp", AddsGroupToFull, GROUP),
    *((name, Replaces, NEW) for name in ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1")),
    ("shard_deepspeed_stage_3", ReplacesBeforeValidation, NEW),
    *((name, ReplacesLater, NEW) for name in ("shard_ddp", "shard_fsdp")),
    *((name, ReplacesInSteps, NEW) for name in ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2")),
    ("shard_fsdp", ReplacesBetweenValidations, NEW),
    ("shard_fsdp", Copies, "Copy it before, in __init__, setup or"),
    ("shard_fsdp", Prunes, "torch.nn.utils.prune's if it is applied after the model was set up to train. Apply"),
    ("shard_deepspeed_stage_2", Prunes, "head.weight (head.weight_orig now) got other names after the model was set"),
]


def _refusals(cases: list[tuple[str, type[Indexed], str]]) -> list[str]:
    wrong = []
    for strategy, kind, said in cases:
        trainer = quiet_trainer(strategy=strategy, max_steps=6, num_sanity_val_steps=1)
        error, message = refusal(trainer.fit, kind(), data(count=8), data(count=8))
        if said not in message or error != "ConfigurationError":
            wrong.append(f"{strategy}, {kind.__name__}: {error}: {message}")
    return wrong


@pytest.mark.matrix
def test_what_can_not_be_followed_is_refused() -> None:
    assert run_distributed(_refusals, 1, CASES) == [[]]


@pytest.mark.matrix
def test_it_is_refused_on_all_ranks() -> None:
    assert run_distributed(_refusals, 2, CASES) == [[], []]
