"""Self-supervised learning: a student predicts the output of its teacher, an average of its own past, on another view.

Bootstrap your own latent (Grill et al. 2020, https://arxiv.org/abs/2006.07733). No label is used in training. The
validation tests whether an image's nearest neighbour is of the same shape.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from examples.recipes.images import Encoder


class Teacher(LightningModule):
    """A student with a predictor, and a teacher that no gradient reaches.

    Args:
        width: Channels of the encoder's first stage.
        momentum: The part of the teacher that stays at each step.
        lr: Learning rate of AdamW.
    """

    def __init__(self, width: int = 8, momentum: float = 0.98, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        features = 4 * width
        projector = nn.Sequential(nn.Linear(features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.student = nn.Sequential(Encoder(width), projector)
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Two minus twice the cosine of the prediction and the teacher's output, for both views."""
        both = torch.cat(batch[:2])
        predicted = self.predictor(self.student(both))
        with torch.no_grad():
            one, other = self.teacher(both).chunk(2)
        loss = 2 - 2 * F.cosine_similarity(predicted, torch.cat((other, one))).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update the teacher. Under a sharded strategy each process averages its shards."""
        kept = self.hparams.momentum
        for mine, its in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            its.data = kept * its.data + (1 - kept) * mine.data

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The part of the images whose nearest neighbour in the batch is of the same shape, over all processes."""
        images, labels = batch
        features = F.normalize(self.student[0](images), dim=-1)
        nearest = (features @ features.T).fill_diagonal_(-1).argmax(-1)
        self.log("val_neighbours", (labels[nearest] == labels).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW over the trained parameters."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)
