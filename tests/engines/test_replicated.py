"""Tensors that are full on every rank, on backends that lack dtypes and where the host must not wait."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.engines.replicated import average_gradients, broadcast_from_rank_0
from lightning_shard.run.checkpoints import restore_buffers
from tests.harness import run_distributed

# ProcessGroupNCCL's ncclDataType, of torch 2.13.
NCCL = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}
NCCL |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float32, torch.bool]


def _broadcast() -> tuple[list[bool], set[torch.dtype]]:
    sent: set[torch.dtype] = set()
    broadcast = dist.broadcast

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.add(tensor.dtype)
        return broadcast(tensor, *args, **kwargs)

    value = 1 + dist.get_rank()
    tensors = [torch.full(shape, value, dtype=dtype) for dtype in DTYPES for shape in ((), (2, 3))]
    tensors.append(torch.full((3, 2), float(value)).t())
    dist.broadcast = noted
    try:
        broadcast_from_rank_0(tensors)
    finally:
        dist.broadcast = broadcast
    return [bool((tensor == 1).all()) for tensor in tensors], sent


def _before_backward() -> float:
    weight, module = nn.Parameter(torch.ones(())), nn.BatchNorm1d(1)
    assert module.running_mean is not None
    loss = weight * module.running_mean.fill_(2.0)
    broadcast_from_rank_0([module.running_mean])
    restore_buffers(module, {"running_mean": torch.tensor([2.0])})
    loss.sum().backward()
    assert weight.grad is not None
    return weight.grad.item()


def _average() -> list[Any]:
    # Anything on their device fails.
    average_gradients([nn.Parameter(torch.empty(2, device="meta"))], reduce_dtype=torch.float32)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), float(dist.get_rank()))
    if dist.get_rank() == 1:
        parameters[1].grad = torch.ones(2)
    average_gradients(parameters, reduce_dtype=torch.float32)
    parameters[0].grad.add_(dist.get_rank())
    average_gradients(parameters, reduce_dtype=torch.float32, new={parameters[1]})
    return [parameter.grad if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


def _all() -> tuple[Any, float, Any]:
    return _broadcast(), _before_backward(), _average()


def test_tensors_are_broadcast_averaged_and_left_to_the_graph() -> None:
    for rank, ((of_rank_0, sent), gradient, averaged) in enumerate(run_distributed(_all, 2)):
        assert all(of_rank_0)
        assert sent <= NCCL, "dtypes that NCCL has"
        assert gradient == 2.0, "a save between forward and backward leaves the graph alone"
        # The hosts agree on gradients that were not averaged yet.
        assert averaged == [[0.5 + rank] * 2, [0.5, 0.5], None]
