"""Pretraining on packed sequences: short documents share a row, and neither attention nor the loss crosses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from examples.python_corpus import load, standard_library

NO_TARGET = -100


def documents(text: Tensor, longest: int) -> list[Tensor]:
    """The functions and classes of the sources, uint8 (bytes,) each, at most ``longest`` bytes of one."""
    parts = bytes(text.tolist()).replace(b"\nclass ", b"\n\0class ").replace(b"\ndef ", b"\n\0def ").split(b"\0")
    return [torch.frombuffer(bytearray(part[:longest]), dtype=torch.uint8) for part in parts if len(part) > 1]


def pack(texts: Iterable[Tensor], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fill rows with documents in their order. A row ends if the next document does not fit.

    Returns:
        Inputs, targets and the number of each byte's document in its row, int64 (rows, length) each. A target is
        -100 if the next byte is of another document, and in the unfilled rest of a row, whose number is -1.
    """
    rows: list[Tensor] = []
    free = 0
    for text in texts:
        if len(text) > free:
            rows.append(torch.stack((torch.zeros(length), *torch.full((2, length), -1.0))).long())
            rows[-1][1] = NO_TARGET
            free, number = length, 0
        place = slice(length - free, length - free + len(text))
        rows[-1][0, place] = text.long()
        rows[-1][1, place.start : place.stop - 1] = text[1:].long()
        rows[-1][2, place] = number
        free, number = free - len(text), number + 1
    inputs, targets, numbers = torch.stack(rows, dim=1)
    return inputs, targets, numbers


class PackedPython(LightningDataModule):
    """The standard library's functions and classes, packed.

    Args:
        seq_len: Bytes in a row.
        batch_size: Rows in a batch of one process.
        limit_bytes: At most so many bytes of text for training and for validation.
    """

    def __init__(self, seq_len: int = 256, batch_size: int = 8, limit_bytes: int = 2_000_000) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read and pack, each process on its own."""
        h = self.hparams
        self.train, self.validation = (
            TensorDataset(*pack(documents(part, h.seq_len), h.seq_len))
            for part in load(standard_library(), 0.05, h.limit_bytes)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled rows of `pack`'s three tensors, (batch, seq_len) each."""
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The same of the validation part, in order."""
        return DataLoader(self.validation, self.hparams.batch_size, drop_last=True)


def document_mask(numbers: Tensor) -> Tensor:
    """Which byte looks at which: back, in its own document. bool (batch, 1, time, time) of int64 (batch, time)."""
    same = numbers[:, :, None] == numbers[:, None, :]
    return same.tril()[:, None]


def chunked_cross_entropy(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """The sum of all cross entropies, with the logits of one chunk at a time in memory, in backward too.

    Args:
        head: the module from hidden states (n, width) to logits (n, vocabulary).
        hidden: float (tokens, width).
        targets: int64 (tokens), -100 for none.
        chunks: parts that the tokens are split into.
    """

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), targets, ignore_index=NO_TARGET, reduction="sum")

    pairs = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in pairs]).sum()


class PackedGPT(GPT):
    """The GPT on packed rows. Each target counts the same, for any number of them in a row or process.

    Args:
        chunks: Parts of a batch whose logits are in memory at a time.
        **kwargs: The GPT's.
    """

    def __init__(self, chunks: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()

    def _loss(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets, numbers = batch
        hidden = self.model.features(inputs, document_mask(numbers))
        loss = chunked_cross_entropy(self.model.head, hidden.flatten(0, 1), targets.flatten(), self.hparams.chunks)
        return loss, (targets != NO_TARGET).sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        """The sum over targets and their number: the strategy divides by the number over all processes."""
        loss, count = self._loss(batch)
        self.log("train_loss", loss.detach() / count, prog_bar=True)
        return {"loss": loss, "weight": count, "reduction": "sum"}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Mean cross entropy per target, over all processes."""
        loss, count = self._loss(batch)
        self.log("val_loss", loss / count, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """The loss says it all."""
