"""Hooks of a module whose parameters stage 3 has released: forward passes run in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import full_tensor, set_full_tensor
from tests.harness import run_distributed
from tests.strategies.test_stateful_modules import Net, fit

WITHOUT_SMALL_ONES = {"stage3": {"param_persistence_threshold": 0}}


class Samples(Net):
    """Runs its layers between steps, and writes a parameter as it should."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([*self.parameters()]):
            self.sampled = self(batch)
        weight = full_tensor(self.trainer, "first.weight")
        assert weight is not None
        set_full_tensor(self.trainer, "first.weight", weight.clamp(-0.3, 0.3))


def _different() -> list[str]:
    wanted = fit(Samples, "shard_ddp", "32-true")
    runs = [fit(Samples, "shard_deepspeed_stage_3", "32-true", **options) for options in (WITHOUT_SMALL_ONES, {})]
    return [n for found in runs for n in wanted if not torch.equal(found[n], wanted[n])]  # type: ignore[arg-type]


@pytest.mark.matrix
def test_forward_passes_and_full_tensors_in_hooks() -> None:
    assert run_distributed(_different, 2) == [[], []]
