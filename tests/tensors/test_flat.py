"""Ranges of flat memory as boxes, and tensors that are made of such ranges."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.errors import CheckpointError
from lightning_shard.tensors.flat import FlatSlice, FlatTensor, boxes
from tests.checkpoint.calls import load_into, save_tensors

FP32, BF16 = torch.float32, torch.bfloat16


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape of 0 to 4 dimensions, some of length 0 or 1, and a range in it, empty or not."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(0, math.prod(shape) - start))


@given(ranges())
@example(((), 0, 1))
@example(((3, 0, 2), 0, 0))
@example(((1, 1, 1, 1), 0, 1))
@example(((5, 5, 5, 5), 1, 623))
def test_boxes_are_the_range_once_in_order_and_few(case):
    shape, start, length = case
    found = boxes(shape, start, length)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    indices = torch.arange(math.prod(shape)).view(shape)
    covered = []
    for box in found:
        assert len(box.offsets) == len(box.sizes) == len(shape)
        assert math.prod(box.sizes) > 0
        part = indices
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        elements = part.flatten().tolist()
        assert elements == list(range(start + box.start, start + box.start + math.prod(box.sizes))), (
            "one run of the flat range"
        )
        covered += elements
    assert covered == list(range(start, start + length)), "every element once"


def cut(tensor: torch.Tensor, bounds: list[int]) -> list[FlatSlice]:
    """A copy of the tensor in pieces of memory of their own."""
    flat = tensor.flatten()
    return [FlatSlice(flat[a:b].clone(), a) for a, b in itertools.pairwise([0, *bounds, flat.numel()])]


@pytest.mark.parametrize(
    ("shape", "source"), [((), FP32), ((9,), BF16), ((5, 3), BF16), ((2, 1, 3, 3), FP32), ((0, 4), FP32)]
)
def test_pieces_are_written_and_filled_in_place_whatever_the_cuts(tmp_path, shape, source):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(source)
    size = values.numel()
    written = FlatTensor(shape, source, cut(values, sorted({size // 3, size // 2})))
    save_tensors(tmp_path / "a.ckpt", {"model.w": written})
    entry = read_manifest(tmp_path / "a.ckpt").tensors["model.w"]
    assert entry == (shape, source)
    whole = torch.empty(shape, dtype=source)
    load_into(tmp_path / "a.ckpt", {"model.w": whole})
    assert torch.equal(whole, values)
    pieces = cut(torch.full(shape, torch.nan, dtype=torch.float32), [size // 4])
    load_into(tmp_path / "a.ckpt", {"model.w": FlatTensor(shape, torch.float32, pieces)})
    assert torch.equal(torch.cat([piece.data for piece in pieces]).view(shape), values.float()), "cast to fp32"


@pytest.mark.parametrize(
    ("shape", "pieces", "message"),
    [
        ((4, 2), [(3, 0)], "the ranks have 3 elements of model.w of shape"),
        ((), [], "no rank has a part of model.w"),
    ],
)
def test_a_tensor_that_nobody_has_whole_is_not_saved(tmp_path, shape, pieces, message):
    tensor = FlatTensor(shape, torch.float32, [FlatSlice(torch.ones(length), start) for length, start in pieces])
    with pytest.raises(CheckpointError, match=message):
        save_tensors(tmp_path / "a.ckpt", {"model.w": tensor})
    assert list(tmp_path.iterdir()) == []
