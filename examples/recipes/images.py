"""An image classifier: a small ResNet with BatchNorm, on images that the loader's workers augment."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from examples.recipes.shapes import SHAPES


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut (He et al. 2015, https://arxiv.org/abs/1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, height, width) in, (batch, channels, height / stride, width / stride) out."""
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


class Encoder(nn.Sequential):
    """Images (batch, 1, 16, 16) to features (batch, 4 * width)."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


class ImageClassifier(LightningModule):
    """A ResNet that names the shape in an image.

    Args:
        width: Channels of the first stage.
        lr: Peak learning rate of SGD, which a cosine takes to nothing.
    """

    def __init__(self, width: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(width)
        self.head = nn.Linear(4 * width, len(SHAPES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.head(self.encoder(images)), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The part of the images whose shape is named, over all processes."""
        images, labels = batch
        accuracy = (self.head(self.encoder(images)).argmax(-1) == labels).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """SGD with momentum and a cosine over the steps of the fit."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
