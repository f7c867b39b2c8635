"""What hooks change after the model was sharded: followed as under DDP, or refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

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


class Mixes(Changes):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.head.weight.grad.add_(torch.randn(self.head.weight.shape))  # type: ignore[union-attr]


class Copies(Changes):
    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self)


GROUP, NEW = "add_param_group is called in a fit", "head.weight, head.bias came after the model was set up"
CASES: list[tuple[str, type[Changes], str]] = [
    ("shard_deepspeed_stage_1", AddsGroup, GROUP),
    ("shard_deepspeed_stage_3", AddsGroup, GROUP),
    ("shard_fsdp", AddsGroupToFull, GROUP),
    *((name, Replaces, NEW) for name in ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1")),
    ("shard_deepspeed_stage_3", ReplacesBeforeValidation, NEW),
    *((name, ReplacesLater, NEW) for name in ("shard_ddp", "shard_fsdp")),
    ("shard_fsdp", ReplacesBetweenValidations, NEW),
    ("shard_fsdp", Copies, "Copy it before, in __init__, setup or"),
    ("shard_fsdp", Mixes, "Use full_tensor(trainer, name) and set_full_tensor"),
]


def _refusals(cases: list[tuple[str, type[Changes], str]]) -> list[str]:
    wrong = []
    for strategy, kind, said in cases:
        trainer = quiet_trainer(strategy=strategy, max_steps=6, num_sanity_val_steps=1)
        error, message = refusal(trainer.fit, kind(), data(count=8), data(count=8))
        if said not in message or error != ("RuntimeError" if kind is Mixes else "ConfigurationError"):
            wrong.append(f"{strategy}, {kind.__name__}: {error}: {message}")
    return wrong


def test_what_can_not_be_followed_is_refused() -> None:
    assert run_distributed(_refusals, 1, CASES) == [[]]


@pytest.mark.matrix
def test_it_is_refused_on_all_ranks() -> None:
    assert run_distributed(_refusals, 2, CASES) == [[], []]
