"""Hooks of a module whose parameters stage 3 has released: forward passes run, and writes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import ConfigurationError, full_tensor, set_full_tensor
from tests.harness import run_distributed
from tests.strategies.test_stateful_modules import Net, fit

WITHOUT_SMALL_ONES = {"stage3": {"param_persistence_threshold": 0}}


class Averages(Net):
    """A teacher that follows the first layer, after forward has released both."""

    def build(self) -> None:
        self.teacher = torch.nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.teacher(x)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)


class Assigns(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.first.weight.data = self.first.weight.data * 0.9


class Momentum(Averages):
    """A teacher that follows in the step, by values that stage 3 has not gathered."""

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.first.weight.data * 0.1
        return super().training_step(batch, batch_idx)


class WritesRow(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.first.weight[3].mul_(0.5)


class Samples(Net):
    """Runs its layers between steps, and writes a parameter as it should."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([*self.parameters()]):
            self.sampled = self(batch)
        weight = full_tensor(self.trainer, "first.weight")
        assert weight is not None
        set_full_tensor(self.trainer, "first.weight", weight.clamp(-0.3, 0.3))


CASES: list[tuple[type[Net], str, dict[str, Any]]] = [
    (WritesRow, "first.weight", {}),
    (Averages, "teacher.weight", WITHOUT_SMALL_ONES),
    (Assigns, "first.weight", {}),
    (Assigns, "first.weight", WITHOUT_SMALL_ONES),
    (Momentum, "teacher.weight", WITHOUT_SMALL_ONES),
]


def _refused() -> None:
    for kind, name, options in CASES:
        with pytest.raises(ConfigurationError, match=rf"^Written to by no optimizer.*: {name}\. Under"):
            fit(kind, "shard_deepspeed_stage_3", "32-true", **options)


def test_a_write_that_would_be_lost_is_refused() -> None:
    run_distributed(_refused, 2)


def _different() -> list[str]:
    wanted = fit(Samples, "shard_ddp", "32-true")
    runs = [fit(Samples, "shard_deepspeed_stage_3", "32-true", **options) for options in (WITHOUT_SMALL_ONES, {})]
    return [n for found in runs for n in wanted if not torch.equal(found[n], wanted[n])]  # type: ignore[arg-type]


def test_forward_passes_and_full_tensors_in_hooks() -> None:
    assert run_distributed(_different, 2) == [[], []]
