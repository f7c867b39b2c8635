"""The Python standard library's own sources as a corpus: real text that every machine already has."""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Third-party packages differ between machines, tests are repetitive, the others hold tables rather than programs.
EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
)


def standard_library() -> Path:
    """Folder of the standard library's sources."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[str]:
    """Python files below ``root``, relative to it with forward slashes, sorted."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if not EXCLUDED.intersection(path.parts))


def is_validation(name: str, fraction: float) -> bool:
    """Whether a file belongs to the validation part: by a hash of its relative path, on every machine alike."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split(names: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Cut file names into (train, validation). Each keeps its order."""
    chosen = [is_validation(name, fraction) for name in names]
    return (
        [name for name, validation in zip(names, chosen, strict=True) if not validation],
        [name for name, validation in zip(names, chosen, strict=True) if validation],
    )


def read(root: Path, names: list[str], limit: int | None) -> Tensor:
    """Concatenate the files that are UTF-8 into one uint8 tensor (bytes,), at most ``limit`` long."""
    text = bytearray()
    for name in names:
        content = (root / name).read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        text += content
        if limit is not None and len(text) >= limit:
            del text[limit:]
            break
    return torch.frombuffer(text, dtype=torch.uint8)


@cache
def load(root: Path, fraction: float, limit: int | None) -> tuple[Tensor, Tensor]:
    """Train and validation text, uint8 (bytes,) each, read once per process."""
    train, validation = split(source_files(root), fraction)
    return read(root, train, limit), read(root, validation, limit)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``seq_len`` bytes that do not overlap, each with its targets: the same bytes one step later."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text = text
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one window: int64 (seq_len,) each."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        window = self.text[start : start + self.seq_len + 1].long()
        return window[:-1], window[1:]


class PythonCorpus(LightningDataModule):
    """Byte windows of the Python standard library, split by file into train and validation.

    Args:
        seq_len: Bytes in a window.
        batch_size: Windows in a batch of one process.
        validation_fraction: Expected fraction of the files that are kept for validation.
        limit_bytes: At most so many bytes of each part, for tests and short runs.
        num_workers: Worker processes of each DataLoader. The text is in memory, so none is usually best.
    """

    def __init__(
        self,
        seq_len: int = 128,
        batch_size: int = 8,
        validation_fraction: float = 0.05,
        limit_bytes: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the text, each process on its own, which takes well under a second."""
        h = self.hparams
        train, validation = load(standard_library(), h.validation_fraction, h.limit_bytes)
        self.train = Windows(train, h.seq_len)
        self.validation = Windows(validation, h.seq_len)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled batches: inputs and targets, int64 (batch_size, seq_len) each."""
        return DataLoader(
            self.train,
            batch_size=self.hparams.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.hparams.num_workers,
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches in order, of the same form."""
        return DataLoader(self.validation, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)
