"""Full tensors of what ranks have parts of, or replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.tensors.flat import FlatSlice, FlatTensor
from lightning_shard.tensors.full import gather_full
from tests.harness import run_distributed

VALUES = torch.tensor([[1.5, -2.0, torch.nan], [1e-42, -0.0, torch.inf]])


def _gathered() -> list[Tensor]:
    """Tensors that every rank has, or each its half of, in two dtypes."""
    found, rank = [], dist.get_rank()
    for values in (VALUES.flatten(), VALUES.bfloat16().flatten()):
        for piece in (FlatSlice(values, 0), FlatSlice(values[3 * rank : 3 * rank + 3], 3 * rank)):
            found.append(gather_full(FlatTensor(VALUES.shape, values.dtype, [piece]), device=torch.device("cpu")))
    return found


def test_every_bit_is_kept() -> None:
    for found in run_distributed(_gathered, 2):
        assert [full.dtype for full in found] == [torch.float32] * 2 + [torch.bfloat16] * 2
        assert all(torch.equal(full.view(torch.uint8), VALUES.to(full.dtype).view(torch.uint8)) for full in found)
