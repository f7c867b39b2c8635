"""A module with parameters, buffers and metrics of every kind, and fits of it that leave no hook behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.ddp import ShardDDPStrategy
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from lightning_shard.strategies.strategy import ShardStrategy
from tests.models import quiet_trainer

BF16, FP32 = torch.bfloat16, torch.float32
ENGINES: dict[str, Callable[..., ShardStrategy]] = {
    "ddp": ShardDDPStrategy,
    "full": ShardFSDPStrategy,
    "hybrid": lambda **kwargs: ShardFSDPStrategy(mesh=MeshConfig(replicate=2, shard=1), **kwargs),
    "offload": lambda **kwargs: ShardFSDPStrategy(cpu_offload=True, **kwargs),
}


class Zoo(pl.LightningModule):
    """BatchNorm, a buffer as of rotary embeddings, a frozen bf16 backbone with an adapter, a tie and a metric."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.seen: list[float] = []
        self.mean = MeanMetric()

    def configure_model(self) -> None:
        if hasattr(self, "backbone"):
            return
        torch.manual_seed(5)
        width = self.width
        self.backbone = nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(BF16).requires_grad_(False)
        self.adapter = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, width, bias=False)
        self.up.weight = self.down.weight
        # No power of a base is a bf16 number.
        self.register_buffer("frequencies", 1.0 / 10000.0 ** (torch.arange(width) / width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sin(self.frequencies * 100.0).to(x.dtype)
        x = self.norm(self.adapter(self.backbone(x)))
        return self.up(torch.tanh(self.down(x)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch.sum().item())
        loss = mse_loss(self(batch).float(), batch.flip(-1))
        self.mean.update(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def batches(width: int = 8) -> DataLoader[Tensor]:
    return DataLoader(torch.randn(64, width, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]


def assert_nothing_left(module: pl.LightningModule, optimizers: list[torch.optim.Optimizer]) -> None:
    """No hook of the ledger, on parameters or optimizers."""
    assert not any(p._backward_hooks for p in module.parameters())
    assert not any(o._optimizer_step_post_hooks for o in optimizers)


def fit(engine: str, module: pl.LightningModule, data: Any, precision: str, steps: int = 1, **kwargs: Any) -> Any:
    pl.seed_everything(1, verbose=False)
    aligned = kwargs.pop("aligned", True)
    strategy = ENGINES[engine](aligned=aligned, **kwargs.pop("strategy", {}))
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=steps, **kwargs)
    trainer.fit(module, data)
    assert trainer.global_step == steps
    assert_nothing_left(module, trainer.optimizers)
    return trainer
