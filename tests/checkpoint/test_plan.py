"""Who writes what: every box once, evened out by bytes, and nothing that is compared with everything."""

from __future__ import annotations

import collections
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from examples.benchmarks.planning import LAYOUTS, cut, gpt_tensors
from lightning_shard.checkpoint.files import tensor_files
from lightning_shard.checkpoint.files.boxes import PlannedBoxes, TensorFacts, covered_once
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.save_plan import divide_boxes, local_boxes, who_describes
from lightning_shard.errors import CheckpointError
from tests.checkpoint.calls import save_tensors

Part = tuple[TensorFacts, list[ChunkStorageMetadata]]


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def held(key: str, shape: tuple[int, ...], *boxes: ChunkStorageMetadata) -> Part:
    return TensorFacts(key, shape, torch.float32), list(boxes)


def whole(key: str, *shape: int) -> Part:
    return held(key, shape, box((0,) * len(shape), shape))


def divided_among(*ranks: list[Part]) -> tuple[list[list[int]], PlannedBoxes]:
    by_rank = [local_boxes(*zip(*parts, strict=True)) for parts in ranks]
    described = [
        parts[number][0] for parts, wanted in zip(ranks, who_describes(by_rank), strict=True) for number in wanted
    ]
    assert len(set(described)) == len(described)
    numbers, written = divide_boxes(described, by_rank)
    return [part.tolist() for part in numbers], written


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3])
def test_every_box_is_written_once_and_the_ranks_have_equal_shares(layout: str, size: int) -> None:
    tensors = gpt_tensors(2, 64)
    ranks = [
        [held(key, shape, *cut(rank, size, layout, shape)) for key, shape in tensors.items()] for rank in range(size)
    ]
    numbers, planned = divided_among(*ranks)
    load = [0] * size
    seen: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    for facts, rows in planned.tables:
        ndim = len(facts.shape)
        for rank, number, _, *bounds in rows.tolist():
            own = [(facts.key, chunk) for facts, boxes in ranks[rank] for chunk in boxes]
            key, chunk = own[numbers[rank][number]]
            assert (key, chunk) == (facts.key, box(tuple(bounds[:ndim]), tuple(bounds[ndim:])))
            assert chunk not in seen[key]
            seen[key].append(chunk)
            load[rank] += 4 * chunk.sizes.numel()
    assert sum(map(len, numbers)) == sum(map(len, seen.values()))
    for key, shape in tensors.items():
        assert sum(chunk.sizes.numel() for chunk in seen[key]) == math.prod(shape)
    if layout == "whole":
        # What one rank has more than another is not more than the largest tensor.
        assert max(load) - min(load) <= 4 * 50304 * 64


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([whole("w", 3), whole("w", 4)], r"rank 1 has w of shape \(4,\) .* another rank of shape \(3,\)"),
        ([held("w", (3,)), held("w", (3,))], "no rank has a part of w"),
        ([held("w", (3,), box((0,), (2,)))], r"the ranks have 2 elements of w of shape \(3,\)"),
        ([held("w", (4,), box((0,), (2,))), held("w", (4,), box((1,), (2,)))], "w has boxes that overlap"),
        (
            [held("w", (4, 2), box((0, 0), (2, 2))), held("w", (4, 2), box((0, 0), (4, 1)))],
            "w has boxes that overlap",
        ),
    ],
)
def test_what_makes_up_no_whole_tensors_is_refused(ranks: list[Part], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        divided_among(*([part] for part in ranks))


Box = tuple[tuple[int, ...], tuple[int, ...]]
SHAPE = (4, 3, 5)


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(*box, strict=True))))


@st.composite
def divided(draw: st.DrawFn) -> list[Box]:
    """Boxes that make up a tensor, of which one may have another one's place, or be smaller."""
    found: list[Box] = [((0, 0, 0), SHAPE)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, 2))
        at = draw(st.integers(0, sizes[dim]))
        for first, size in ((0, at), (at, sizes[dim] - at)):
            moved = tuple(offset + first * (d == dim) for d, offset in enumerate(offsets))
            found.append((moved, tuple(size if d == dim else other for d, other in enumerate(sizes))))
    number = draw(st.integers(0, len(found) - 1))
    offsets, sizes = found[draw(st.integers(0, len(found) - 1))]
    if draw(st.booleans()):
        found[number] = offsets, tuple(draw(st.integers(0, size)) for size in sizes)
    return found


@given(divided())
def test_gaps_and_overlaps_are_found_as_by_looking_at_every_element(found: list[Box]) -> None:
    counts = collections.Counter(cell for box in found for cell in cells(box))
    begin, sizes = (np.array(part, dtype=np.int64) for part in zip(*found, strict=True))
    exact = len(counts) == math.prod(SHAPE) and set(counts.values()) == {1}
    assert covered_once(SHAPE, begin, sizes) == exact


def test_many_boxes_are_described_as_numbers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_MOST_IN_METADATA", 1)
    tensors = {"model.a": torch.arange(3.0), "model.b": torch.arange(4.0)}
    save_tensors(tmp_path / "a.ckpt", tensors)
    assert not (tmp_path / "a.ckpt/.metadata").exists()
    assert all(torch.equal(t.read(), tensors[key]) for key, t in open_any(tmp_path / "a.ckpt").tensors.items())
