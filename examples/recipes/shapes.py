"""Made-up grey images of four shapes: data for every recipe on images, with nothing to download."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SIZE = 16
SHAPES = ("disc", "ring", "square", "cross")


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of random place and size, float (count, 1, 16, 16) from -1 to 1, and their shapes, int64 (count)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    radius = 3 + 3 * torch.rand(count, 1, 1, generator=generator)
    centre = SIZE / 2 + 4 * torch.rand(2, count, 1, 1, generator=generator) - 2
    y, x = torch.meshgrid(torch.arange(SIZE) + 0.5, torch.arange(SIZE) + 0.5, indexing="ij")
    dy, dx = (y - centre[0]).abs(), (x - centre[1]).abs()
    round_, square = (dy**2 + dx**2).sqrt(), torch.maximum(dy, dx)
    # How far inside of the shape each pixel is. A pixel at its edge is grey.
    inside = torch.stack(
        (
            radius - round_,
            1.2 - (round_ - radius + 1.2).abs(),
            radius - 0.8 - square,
            torch.minimum(radius - square, 1.2 - torch.minimum(dy, dx)),
        )
    )
    images = inside[labels, torch.arange(count)].clamp(-0.5, 0.5) * 2
    return images[:, None], labels


class Views(Dataset[tuple[Tensor, ...]]):
    """``views`` images of one shape, each flipped and noisy in its own way, drawn by the loader's worker."""

    def __init__(self, images: Tensor, labels: Tensor, views: int, noise: float) -> None:
        self.images, self.labels, self.views, self.noise = images, labels, views, noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """``views`` images, float (1, 16, 16) each, and the shape, int64 ()."""
        return *(self._view(self.images[index]) for _ in range(self.views)), self.labels[index]

    def _view(self, image: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        shift = torch.randint(-2, 3, (2,)).tolist()
        return image.roll(shift, (-2, -1)) + self.noise * torch.randn(image.shape)


class Shapes(LightningDataModule):
    """Images of four shapes.

    Args:
        samples: Images for training, and a tenth of that for validation.
        batch_size: Images in a batch of one process.
        views: Images of each shape in a sample of training.
        noise: Standard deviation of the noise in a view.
        num_workers: Worker processes of the loader, which draw the views.
    """

    def __init__(
        self, samples: int = 4000, batch_size: int = 32, views: int = 1, noise: float = 0.0, num_workers: int = 1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Draw the same images on every process."""
        h = self.hparams
        self.train = Views(*draw(h.samples, seed=0), views=h.views, noise=h.noise)
        self.validation = Views(*draw(h.samples // 10, seed=1), views=1, noise=h.noise)

    def _loader(self, data: Views, shuffle: bool) -> DataLoader[Any]:
        h = self.hparams
        workers = {"num_workers": h.num_workers, "persistent_workers": h.num_workers > 0}
        return DataLoader(data, h.batch_size, shuffle=shuffle, drop_last=shuffle, **workers)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled views, float (batch, 1, 16, 16) each, and shapes, int64 (batch)."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """One view of each image of the validation part, in order."""
        return self._loader(self.validation, shuffle=False)
