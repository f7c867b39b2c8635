"""Labelled texts as batches of tokens, the common base of the classifier's data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from examples.classifier import folder_of

Labelled = tuple[str, int]


def spread(part: list[Labelled], limit: int | None) -> list[Labelled]:
    """At most ``limit`` of them, evenly spaced: texts of one label lie together."""
    count = len(part) if limit is None else min(limit, len(part))
    return [part[index * len(part) // count] for index in range(count)]


class LabelledTexts(LightningDataModule, ABC):
    """Texts with a number each, tokenized as batches are made.

    A subclass has ``encoder``, ``max_length``, ``batch_size``, ``validation_fraction`` and ``limit`` among its
    ``hparams``.
    """

    @abstractmethod
    def parts(self) -> tuple[list[Labelled], list[Labelled]]:
        """All texts to train on, and all to validate on."""

    def setup(self, stage: str) -> None:
        """Read the texts, each process on its own."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder_of(self.hparams.encoder))
        self.train, self.validation = (spread(part, self.hparams.limit) for part in self.parts())

    def collate(self, items: list[Labelled]) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask`` (batch, time) and ``labels`` (batch,), all int64."""
        texts, labels = zip(*items, strict=True)
        batch: dict[str, Any] = self.tokenizer(
            list(texts), truncation=True, max_length=self.hparams.max_length, padding="max_length", return_tensors="pt"
        )
        return {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": torch.tensor(labels)}

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches, see `collate`."""
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Any]:
        """Batches in order, see `collate`."""
        return DataLoader(self.validation, self.hparams.batch_size, collate_fn=self.collate)
