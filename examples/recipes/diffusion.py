"""A diffusion model: a U-Net that predicts the noise in an image, validated with the average of its weights (EMA)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Stage(nn.Module):
    """A residual convolution block that is told the time."""

    def __init__(self, channels_in: int, channels: int, time_width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels_in)
        self.first = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.time = nn.Linear(time_width, channels)
        self.second_norm = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map (batch, channels_in, height, width) and (batch, time_width) to (batch, channels, height, width)."""
        inner = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.second(F.silu(self.second_norm(inner))) + self.shortcut(x)


class UNet(nn.Module):
    """Three resolutions with connections across (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList((Stage(width, width, time), Stage(width, 2 * width, time)))
        self.middle = Stage(2 * width, 2 * width, time)
        self.up = nn.ModuleList((Stage(4 * width, width, time), Stage(2 * width, width, time)))
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """The noise in images (batch, 1, 16, 16) at levels (batch) from 0, clean, to 1, noise alone."""
        frequency = torch.exp(torch.linspace(0, math.log(1000.0), self.width // 2, device=x.device))
        angle = level[:, None] * frequency
        time = self.time(torch.cat((angle.sin(), angle.cos()), dim=-1).to(x.dtype))
        x = self.enter(x)
        across = []
        for stage in self.down:
            x = stage(x, time)
            across.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for stage in self.up:
            x = stage(torch.cat((F.interpolate(x, scale_factor=2.0), across.pop()), dim=1), time)
        return self.leave(x)


def mix(images: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Images under noise, of variance one at each level (the cosine schedule, https://arxiv.org/abs/2102.09672)."""
    angle = level[:, None, None, None] * math.pi / 2
    return angle.cos() * images + angle.sin() * noise


class Diffusion(LightningModule):
    """Predicts the noise in an image. The average of its weights predicts best.

    Args:
        width: Channels at the highest resolution, a multiple of 8.
        lr: Learning rate of AdamW.
    """

    def __init__(self, width: int = 16, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.unet = UNet(width)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error of the noise, at levels drawn at random."""
        images = batch[0]
        noise, level = torch.randn_like(images), torch.rand(len(images), device=images.device)
        loss = F.mse_loss(self.unet(mix(images, noise, level), level), noise)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same with the same noise and levels each time, so that two validations can be compared."""
        images = batch[0]
        generator = torch.Generator().manual_seed(batch_idx)
        noise = torch.randn(images.shape, generator=generator).to(images)
        level = torch.rand(len(images), generator=generator).to(images.device)
        loss = F.mse_loss(self.unet(mix(images, noise, level), level), noise)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
