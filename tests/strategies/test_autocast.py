"""``autocast: true`` gives the numbers of stock Lightning on every engine."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard import ShardPrecision
from tests.harness import run_distributed
from tests.models import loader, quiet_trainer, whole_parameters

VOCAB = 37
NAMES = ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1", "shard_deepspeed_stage_2", "shard_deepspeed_stage_3"]


class Stock(pl.LightningModule):
    """A model and a loss as under autocast: nothing is cast by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCAB)
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = x + block(x)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit(strategy: Any, precision: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], set[torch.dtype]]:
    pl.seed_everything(1, verbose=False)
    module = Stock()
    trainer = quiet_trainer(strategy=strategy, max_steps=4, **precision)
    trainer.fit(module, loader())
    ledger = getattr(trainer.strategy, "ledger", None)
    weights = whole_parameters(module)
    return module.losses, weights, set() if ledger is None else set(ledger.loss)


def _stock() -> Any:
    return _fit(DDPStrategy(process_group_backend="gloo"), {"precision": "bf16-mixed"})


def _ours(name: str, **settings: Any) -> Any:
    return _fit(name, {"plugins": [ShardPrecision("bf16-mixed", **settings)]})


def _differences(names: list[str], **settings: Any) -> list[str]:
    losses, weights, _ = _stock()
    found = []
    for name in names:
        own_losses, own, _ = _ours(name, **settings)
        if not all(torch.equal(a, b) for a, b in zip(losses, own_losses, strict=True)):
            found.append(f"{name}: losses")
        found += [f"{name}: {n}" for n, w in weights.items() if not torch.equal(w, own[n])]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast_gives_stock_ddps_numbers(ranks: int) -> None:
    assert run_distributed(_differences, ranks, NAMES, autocast=True) == [[]] * ranks


def test_casting_modules_gives_other_numbers() -> None:
    # Guards the test above: what it compares is not equal by itself.
    assert all("shard_fsdp: losses" in found for found in run_distributed(_differences, 2, ["shard_fsdp"]))
