"""A student whose loss depends on a teacher, for tests of code that reads and writes parameters between steps."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import VOCAB

WIDTH = 6


class Net(nn.Module):
    """A tied head, sizes that no number of ranks divides, a frozen parameter and one without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embed.weight
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens) + self.shift) * self.gain
        return self.head(x) + self.out(x)


class Taught(pl.LightningModule):
    """A student whose loss depends on the values that forward sees of a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, taught = self.student(batch[0]), self.teacher(batch[0])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())
        loss = loss + functional.mse_loss(logits.float(), taught.float())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.student(batch[0]), self.teacher(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-2)
