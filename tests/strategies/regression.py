"""A regression that is trained under every setting, its data, and what is compared of two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shard.ranks import Ranks
from tests.models import quiet_trainer, whole_parameters

WIDTH, STEPS, BATCH = 6, 4, 4


def data(batch_size: int = BATCH, *, world: int = 1, rank: int = 0) -> DataLoader[Any]:
    """Rank r reads the samples r, r + world, ..., so that a batch of all ranks together is the one-process batch."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(x, x.roll(1, 1).tanh())
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH + 1)
        self.b = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).tanh())


class Regression(pl.LightningModule):
    """Fits random data; subclasses say what the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seen: list[float] = []
        torch.manual_seed(5)
        self.build()

    def build(self) -> None:
        self.net = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].sum().item())
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def loss(self, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(self(batch[0]).float(), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(kind: Callable[[], Regression], strategy: Any, precision: str = "32-true") -> Any:
    pl.seed_everything(1, verbose=False)
    module = kind()
    mine = data(world=dist.get_world_size(), rank=dist.get_rank())
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, limit_train_batches=STEPS)
    trainer.fit(module, mine, mine)
    return module


def compare(found: nn.Module, expected: nn.Module, what: object) -> None:
    mine, theirs = whole_parameters(found), whole_parameters(expected)
    assert list(mine) == list(theirs), what
    wrong = [n for n in theirs if mine[n].dtype != theirs[n].dtype or not torch.equal(mine[n], theirs[n])]
    assert not wrong, what


def check_equal_on_ranks(module: nn.Module) -> None:
    for name, tensor in whole_parameters(module).items():
        assert all(torch.equal(tensor, other) for other in Ranks.of().gather(tensor)), name
