"""Where boxes lie is read as numbers, and found for each rank alone."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_shard.checkpoint.files.boxes import DecodedBoxes, encode_boxes
from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.manifest import Facts, Manifest, TensorEntry
from lightning_shard.errors import CheckpointCorruptError

RANKS, TENSORS = 4096, 20


def manifest(ranks: int, keys: int, shape: tuple[int, ...]) -> Manifest:
    return Manifest(
        facts=Facts(engine="e", policy="p", world_size=ranks),
        tensors={f"model.w{i:03}": TensorEntry(shape, torch.float32) for i in range(keys)},
        aliases={},
        slots={},
        files={f"__{rank}_0.distcp": FileEntry(size=10**6, sha256="") for rank in range(ranks)},
    )


def tables(*rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(part, dtype=np.int64) for part in rows]


def test_each_rank_finds_its_boxes() -> None:
    found = manifest(RANKS, TENSORS, (2 * RANKS, 8))
    rows = [[rank, 64 * (rank % 7), 64, 2 * rank, 0, 2, 8] for rank in range(RANKS)]
    data = encode_boxes(tables(*[rows] * TENSORS))
    boxes = DecodedBoxes(data, found)
    mine = ChunkStorageMetadata(torch.Size((7, 0)), torch.Size((3, 8)))  # the second row of rank 3's, all of rank 4's
    expected = [(rows[3], [7, 0], [8, 8]), (rows[4], [8, 0], [10, 8])]
    assert [list(boxes[key].meeting(mine)) for key in found.tensors] == [expected] * TENSORS
    # What each rank reads of a box of each other rank: two bytes, not 56.
    assert len(data) < 2 * RANKS * TENSORS


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([0, 0, 64, 1, 0, 2, 8], "without overlap"),
        ([1, 0, 64, 2, 0, 1, 8], "without overlap"),
        ([2, 0, 64, 2, 0, 2, 8], "outside of the files"),
        ([1, 10**6, 64, 2, 0, 2, 8], "or of its file"),
        ([1, 2**62, 2**62, 2, 0, 2, 8], "outside of the files"),
        ([1, -1, 64, 2, 0, 2, 8], "outside of the files"),
        ([1, 0, 60, 2, 0, 2, 8], "more elements than bytes"),
        ([1, 0, 64, 3, 0, 2, 8], "outside of its shape"),
        ([1, 0, 64, 2**62, 0, 2**62, 8], "outside of its shape"),
    ],
)
def test_boxes_that_are_not_the_tensor(row: list[int], said: str) -> None:
    data = encode_boxes(tables([[0, 0, 64, 0, 0, 2, 8], row]))
    with pytest.raises(CheckpointCorruptError, match=said):
        DecodedBoxes(data, manifest(2, 1, (4, 8)))["model.w000"].check_covered("w")


@pytest.mark.parametrize("change", [-1, 8, 56])
def test_a_file_that_is_longer_or_shorter(change: int) -> None:
    data = encode_boxes(tables([[0, 0, 64, 0, 0, 2, 8], [1, 0, 64, 2, 0, 2, 8]]))
    changed = data[:change] if change < 0 else data + np.zeros(change, dtype=np.uint8).tobytes()
    with pytest.raises((CheckpointCorruptError, ValueError)):
        DecodedBoxes(changed, manifest(2, 1, (4, 8)))


def test_a_small_file_does_not_become_a_large_table() -> None:
    count = 10**6
    block = zlib.compress(bytes(7 * 8 * count))
    data = np.array([count, len(block)], dtype="<i8").tobytes() + block
    assert len(data) < 10**5
    with pytest.raises(CheckpointCorruptError, match="1000000 boxes, for which the files are too small"):
        DecodedBoxes(data, manifest(2, 1, (4, 8)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_table_of_another_size_than_is_said(count: int) -> None:
    block = zlib.compress(bytes(7 * 8 * 2))
    data = np.array([count, len(block)], dtype="<i8").tobytes() + block
    with pytest.raises(CheckpointCorruptError, match=f"the boxes of model.w000 are not {count}"):
        DecodedBoxes(data, manifest(2, 1, (4, 8)))["model.w000"]


def test_bytes_that_are_not_compressed() -> None:
    data = np.array([1, 9], dtype="<i8").tobytes() + b"not zlib!"
    with pytest.raises(CheckpointCorruptError, match=r"the boxes of model\.w000 can't be read"):
        DecodedBoxes(data, manifest(2, 1, (4, 8)))["model.w000"]
