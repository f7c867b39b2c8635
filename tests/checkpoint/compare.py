"""The tensors of any checkpoint, and that two of them are the same bits."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lightning_shard.checkpoint.foreign.forms import open_any
from tests.checkpoint.nets import bits


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {key: tensor.read() for key, tensor in open_any(path).tensors.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert tensor.shape == other[key].shape, key
        assert bits(tensor) == bits(other[key]), key
