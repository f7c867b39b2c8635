"""Hooks of a module that use parameters stage 3 has released: with DDP's numbers, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import ConfigurationError, full_tensor, set_full_tensor
from tests.harness import run_distributed
from tests.strategies.test_stateful_modules import Net, fit

WITHOUT_SMALL_ONES = {"stage3": {"param_persistence_threshold": 0}}


class ReadsNorm(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", self.first.weight.norm())


class Averages(Net):
    """A teacher that follows the first layer, after forward has released both."""

    def build(self) -> None:
        self.teacher = torch.nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.teacher(x)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.teacher.weight.data.lerp_(self.first.weight.data, 0.1)


class Assigns(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.first.weight.data = self.first.weight.data * 0.9


class WritesRow(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.first.weight[3].mul_(0.5)


class ClipsMatrices(Net):
    """Finds matrices by their dimensions, which a released parameter does not have."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1 and parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)


class Samples(Net):
    """Runs its layers between steps, counts its parameters, and writes one as it should."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            self.sampled = self(batch)
        assert [tuple(p.shape) for p in self.parameters()] == [(6, 6), (6,), (6, 6), (6,)]
        assert sum(p.numel() for p in self.parameters()) == 84
        weight = full_tensor(self.trainer, "first.weight")
        assert weight is not None
        set_full_tensor(self.trainer, "first.weight", weight.clamp(-0.3, 0.3))


def _refused(kind: Callable[[], Net], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(kind, "shard_deepspeed_stage_3", "32-true", **options)


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ReadsNorm, "A hook uses parameters that", WITHOUT_SMALL_ONES),
        (WritesRow, "A hook uses parameters that", WITHOUT_SMALL_ONES),
        (WritesRow, "first.weight was written to between two steps", {}),
        (Averages, "A hook (uses|writes to)", WITHOUT_SMALL_ONES),
        (Averages, "A hook (uses|writes to)", {}),
        (Assigns, "A hook writes to first.weight with __set__", {}),
        (ClipsMatrices, r"uses \.grad of first.weight", WITHOUT_SMALL_ONES),
    ],
)
def test_what_would_be_lost_or_zero_is_refused(kind: type[Net], message: str, options: dict[str, Any]) -> None:
    run_distributed(_refused, 2, kind, message, options)


def _different() -> list[str]:
    wanted = fit(Samples, "shard_ddp", "32-true")
    runs = [fit(Samples, "shard_deepspeed_stage_3", "32-true", **options) for options in (WITHOUT_SMALL_ONES, {})]
    return [n for found in runs for n in wanted if not torch.equal(found[n], wanted[n])]  # type: ignore[arg-type]


def test_forward_passes_and_sizes_in_hooks() -> None:
    assert run_distributed(_different, 2) == [[], []]
