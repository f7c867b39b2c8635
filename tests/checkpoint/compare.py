"""The tensors of any checkpoint, and that two sets of tensors are the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lightning_shard.checkpoint.inspect import open_any
from tests.checkpoint.nets import bits


def stored(path: str | Path) -> dict[str, Tensor]:
    return {key: tensor.read() for key, tensor in open_any(path).tensors.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: object = "") -> None:
    assert found.keys() == expected.keys(), where
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), (where, key)
        assert bits(found[key]) == bits(tensor), (where, key)
