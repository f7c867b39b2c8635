"""Full tensors of what ranks have parts of, or replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.tensors.flat import FlatSlice, FlatTensor
from lightning_shard.tensors.full import gather_full
from tests.harness import run_distributed

VALUES = torch.tensor([[1.5, -2.0, torch.nan], [1e-42, -0.0, torch.inf]])


def _gathered(replicas: bool, dtype: torch.dtype) -> Tensor:
    """What is made of a tensor that every rank has, or each its half of."""
    values, rank = VALUES.to(dtype).flatten(), dist.get_rank()
    slices = [FlatSlice(values, 0)] if replicas else [FlatSlice(values[3 * rank : 3 * rank + 3], 3 * rank)]
    return gather_full(FlatTensor(VALUES.shape, dtype, slices), device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("replicas", [False, True], ids=["parts", "replicas"])
def test_every_bit_is_kept(replicas: bool, dtype: torch.dtype) -> None:
    for found in run_distributed(_gathered, 2, replicas, dtype):
        assert torch.equal(found.view(torch.uint8), VALUES.to(dtype).view(torch.uint8))
