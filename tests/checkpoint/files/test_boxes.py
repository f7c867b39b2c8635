"""Where boxes lie is read as numbers, and found for each rank alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_shard.checkpoint.files.boxes import decode_boxes, encode_boxes
from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.manifest import Facts, Manifest, TensorEntry
from lightning_shard.errors import CheckpointCorruptError

RANKS, TENSORS = 4096, 20


def manifest(ranks: int, keys: int, shape: tuple[int, ...]) -> Manifest:
    return Manifest(
        facts=Facts(engine="e", policy="p", world_size=ranks),
        tensors={f"model.w{i:03}": TensorEntry(shape=shape, dtype="float32") for i in range(keys)},
        aliases={},
        slots={},
        files={f"__{rank}_0.distcp": FileEntry(size=10**6, sha256="") for rank in range(ranks)},
    )


def test_many_ranks_take_no_time_for_each_of_their_boxes() -> None:
    found = manifest(RANKS, TENSORS, (2 * RANKS, 8))
    rows = {key: [[rank, 0, 64, 2 * rank, 0, 2, 8] for rank in range(RANKS)] for key in found.tensors}
    data = encode_boxes(rows)
    started = time.process_time()
    boxes = decode_boxes(data, found)
    mine = ChunkStorageMetadata(torch.Size((7, 0)), torch.Size((3, 8)))  # the second row of rank 3's, all of rank 4's
    met = [list(boxes[key].meeting(mine)) for key in found.tensors]
    # 80,000 boxes: less than 8 us each, a quarter of what one as an object took.
    assert time.process_time() - started < 0.7
    assert met == [[(3, [7, 0], [8, 8]), (4, [8, 0], [10, 8])]] * TENSORS


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
    rows = {"model.w000": [[0, 0, 64, 0, 0, 2, 8], row]}
    with pytest.raises(CheckpointCorruptError, match=said):
        decode_boxes(encode_boxes(rows), manifest(2, 1, (4, 8)))


@pytest.mark.parametrize("change", [-1, 8, 56])
def test_a_file_that_is_longer_or_shorter(change: int) -> None:
    data = encode_boxes({"model.w000": [[0, 0, 64, 0, 0, 2, 8], [1, 0, 64, 2, 0, 2, 8]]})
    changed = data[:change] if change < 0 else data + np.zeros(change, dtype=np.uint8).tobytes()
    with pytest.raises((CheckpointCorruptError, ValueError)):
        decode_boxes(changed, manifest(2, 1, (4, 8)))
