"""A generative adversarial network: two optimizers in turn, on points of eight clusters in a ring."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MODES = 8


def centres() -> Tensor:
    """The clusters' centres on a circle of radius 1, float (8, 2)."""
    angle = torch.arange(MODES) * 2 * math.pi / MODES
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


class Ring(LightningDataModule):
    """Points around the centres.

    Args:
        samples: Points for training.
        batch_size: Points in a batch of one process.
    """

    def __init__(self, samples: int = 20000, batch_size: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Draw the same points on every process."""
        generator = torch.Generator().manual_seed(0)
        place = torch.randint(MODES, (self.hparams.samples,), generator=generator)
        points = centres()[place] + 0.05 * torch.randn(len(place), 2, generator=generator)
        self.points = TensorDataset(points)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled points, float (batch, 2)."""
        return DataLoader(self.points, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """As many points as are generated in a validation."""
        return DataLoader(self.points, 500)


def layers(first: int, width: int, last: int) -> nn.Sequential:
    """Four linear layers."""
    hidden = (nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2))
    return nn.Sequential(nn.Linear(first, width), nn.LeakyReLU(0.2), *hidden, nn.Linear(width, last))


class GAN(LightningModule):
    """A generator and a discriminator in manual optimization.

    Args:
        width: Width of both networks.
        latent: Numbers that a point is generated from.
        lr: Learning rate of both Adams.
    """

    def __init__(self, width: int = 128, latent: int = 8, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = layers(latent, width, 2)
        self.discriminator = layers(2, width, 1)

    def _generate(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.latent, device=self.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A step of each, with the loss that does not saturate (https://arxiv.org/abs/1406.2661, section 3)."""
        (points,) = batch
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_discriminator)
        real, made = self.discriminator(points), self.discriminator(self._generate(len(points)).detach())
        loss = F.softplus(-real).mean() + F.softplus(made).mean()
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)
        self.toggle_optimizer(of_generator)
        fooled = F.softplus(-self.discriminator(self._generate(len(points)))).mean()
        self.manual_backward(fooled)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"train_loss": fooled, "discriminator_loss": loss}, prog_bar=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The part of the points generated that lie within four deviations of a centre, and the centres reached."""
        distance, place = torch.cdist(self._generate(len(batch[0])), centres().to(self.device)).min(-1)
        near = distance < 0.2
        reached = place[near].bincount(minlength=MODES).gt(len(place) / MODES / 10).sum()
        self.log_dict({"val_near": near.float().mean(), "val_centres": reached.float()}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """One Adam each."""
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9)) for part in parts]
