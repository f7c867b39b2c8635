"""Made-up images of ten classes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningDataModule):
    """Ten patterns of 8 x 8 pixels under noise.

    Args:
        samples: Images for training, and a tenth of that for validation.
        batch_size: Images in a batch of one process.
    """

    def __init__(self, samples: int = 4000, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Draw the same images on every process."""
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 64, generator=generator)
        count = self.hparams.samples * 11 // 10
        labels = torch.randint(10, (count,), generator=generator)
        images = patterns[labels] + torch.randn(count, 64, generator=generator)
        split = self.hparams.samples
        self.train = TensorDataset(images[:split], labels[:split])
        self.validation = TensorDataset(images[split:], labels[split:])

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled images, fp32 (batch, 64), and classes, int64 (batch)."""
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The same of the validation part, in order."""
        return DataLoader(self.validation, self.hparams.batch_size)
