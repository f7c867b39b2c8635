"""A classifier."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Classifier(LightningModule):
    """Residual blocks over 64 pixels, ten classes.

    Args:
        width: Width of the blocks.
        layers: Number of blocks.
        lr: Learning rate of AdamW.
    """

    def __init__(self, width: int = 128, layers: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (batch, 10)."""
        hidden = self.first(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The part of the images whose class is found, over all processes."""
        images, labels = batch
        accuracy = (self(images).argmax(-1) == labels).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
