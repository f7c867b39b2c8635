"""The places of boxes are read as numbers, and those that are none are refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from lightning_shard.checkpoint.files.boxes import DecodedBoxes, encode_boxes
from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.manifest import Facts, Manifest, TensorEntry
from lightning_shard.errors import CheckpointCorruptError


def manifest(ranks: int, keys: int, shape: tuple[int, ...]) -> Manifest:
    return Manifest(
        facts=Facts(engine="e", policy="p", world_size=ranks),
        tensors={f"model.w{i:03}": TensorEntry(shape, torch.float32) for i in range(keys)},
        aliases={},
        slots={},
        files={f"__{rank}_0.distcp": FileEntry(size=10**6, sha256="") for rank in range(ranks)},
    )


def encoded(*tables: list[list[int]]) -> bytes:
    return encode_boxes([np.array(rows, dtype=np.int64) for rows in tables])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([0, 0, 64, 1, 0, 2, 8], "without overlap"),
        ([1, 0, 64, 2, 0, 1, 8], "without overlap"),
        ([2, 0, 64, 2, 0, 2, 8], "outside of the files"),
        ([1, 10**6, 64, 2, 0, 2, 8], "or of its file"),
        ([1, 2**62, 2**62, 2, 0, 2, 8], "outside of the files"),
        ([1, 0, 60, 2, 0, 2, 8], "more elements than bytes"),
        ([1, 0, 64, 2**62, 0, 2**62, 8], "outside of its shape"),
    ],
)
def test_boxes_that_are_not_the_tensor(row: list[int], said: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=said):
        DecodedBoxes(encoded([[0, 0, 64, 0, 0, 2, 8], row]), manifest(2, 1, (4, 8)))["model.w000"].check_covered("w")


def table(count: int, block: bytes) -> bytes:
    return np.array([count, len(block)], dtype="<i8").tobytes() + block


def test_tables_of_another_size() -> None:
    """A small file does not become a large table."""
    whole, two = encoded([[0, 0, 64, 0, 0, 2, 8], [1, 0, 64, 2, 0, 2, 8]]), zlib.compress(bytes(7 * 8 * 2))
    for data, said in {
        whole[:-1]: "ends before",
        whole + bytes(8): "more boxes",
        table(10**6, zlib.compress(bytes(7 * 8 * 10**6))): "1000000 boxes, for which the files are too small",
        table(1, two): "the boxes of model.w000 are not 1",
        table(3, two): "the boxes of model.w000 are not 3",
        table(1, b"not zlib!"): r"the boxes of model\.w000 can't be read",
    }.items():
        with pytest.raises(CheckpointCorruptError, match=said):
            DecodedBoxes(data, manifest(2, 1, (4, 8)))["model.w000"]
