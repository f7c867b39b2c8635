"""What an optimizer will keep for each tensor that it steps, before it did."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.planning.facts import OptimizerFacts

# Settings of how a step is computed, which go with some devices alone.
_WAYS = {"foreach", "fused", "capturable", "differentiable"}


def optimizer_facts(optimizer: Optimizer) -> OptimizerFacts | None:
    """The state that ``optimizer`` keeps, seen on a small one of its kind and settings; None: that can't be made."""
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known and name not in _WAYS}
    parameter = nn.Parameter(torch.zeros(3, 5))
    parameter.grad = torch.zeros(3, 5)
    try:
        small = type(optimizer)([parameter], **settings)
        small.step()
    except Exception:
        return None
    tensors = [value for value in small.state[parameter].values() if isinstance(value, Tensor)]
    elementwise = [tensor for tensor in tensors if tensor.shape == parameter.shape]
    return OptimizerFacts(
        slots=tuple(None if tensor.dtype == parameter.dtype else tensor.dtype for tensor in elementwise),
        fixed_bytes=sum(tensor.nbytes for tensor in tensors if tensor.shape != parameter.shape),
    )
