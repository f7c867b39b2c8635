"""Embeddings with sparse gradients under DDP, bit by bit those with dense ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import ShardDDPStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters


class Embeds(TinyLM):
    """One gradient of the last rank is NaN in a batch."""

    sparse = True

    def configure_model(self) -> None:
        super().configure_model()
        self.embed.sparse = self.sparse

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != 3 or self.global_rank == 0:
            return loss
        x = self.embed(batch[0])
        return loss + (x.detach() - x).square().sum().sqrt()  # 0, and its gradient 0 * inf

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _fit(sparse: bool, settings: dict[str, Any], callbacks: Any = (), **trainer: Any) -> tuple[Any, list[str]]:
    module, strategy = Embeds(), ShardDDPStrategy(**settings)
    module.sparse = sparse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy=strategy, max_steps=4, accumulate_grad_batches=2, callbacks=[*callbacks], **trainer).fit(
            module, loader(shuffle=False)
        )
    return whole_parameters(module), [str(each.message) for each in caught]


SKIPS = {"nonfinite": {"action": "skip", "find_module": True}}
BY_VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}


def _both(settings: dict[str, Any], trainer: dict[str, Any]) -> tuple[list[str], list[str]]:
    (sparse, said), (dense, _) = (_fit(kind, {**SKIPS, **settings}, **trainer) for kind in (True, False))
    differing = [name for name, tensor in dense.items() if not torch.equal(sparse[name], tensor)]
    return differing, [text for text in said if "The step is skipped." in text]


@pytest.mark.parametrize(
    ("settings", "trainer"), [({"aligned": True}, {"gradient_clip_val": 0.05}), ({"log_grad_norm": True}, BY_VALUE)]
)
def test_they_are_accumulated_clipped_and_looked_at(settings: dict[str, Any], trainer: dict[str, Any]) -> None:
    (differing, (said,)), (other, _) = run_distributed(_both, 2, settings, trainer)
    assert not differing + other
    assert "First on rank 0: the gradient of embed.weight. First on rank 1: the gradient of embed.weight." in said
