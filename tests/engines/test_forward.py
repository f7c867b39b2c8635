"""What stands in for a module's parameters in a step under FSDP."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shard.engines.forward import _GatheredOnRead
from tests.harness import run_distributed


def shard_between_forward_and_backward() -> bool:
    module, plain = nn.Linear(4, 4, bias=False), torch.ones(4, 4)
    module.weight = nn.Parameter(distribute_tensor(plain, init_device_mesh("cpu", (1,)), [Shard(0)]))
    _GatheredOnRead(module, module)  # type: ignore[arg-type]
    fewer = init_device_mesh("cpu", (1, 1))
    between = nn.Parameter(distribute_tensor(plain, fewer, [Replicate(), Shard(0)]))
    module.weight, gone = between, weakref.ref(between)
    del between
    module.weight = nn.Parameter(plain)
    return gone() is None


def test_a_shard_over_fewer_ranks_is_not_kept() -> None:
    assert run_distributed(shard_between_forward_and_backward, 1) == [True]
