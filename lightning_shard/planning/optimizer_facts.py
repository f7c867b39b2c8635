"""The state of an optimizer, before its first step: seen on fake tensors, or on a small optimizer of its kind."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.planning.facts import OptimizerFacts
from lightning_shard.planning.live_bytes import LiveBytes
from lightning_shard.planning.memory_trace import TraceError, explained

# Settings of how a step is computed, which go with some devices alone.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}


def optimizer_facts(optimizer: Optimizer) -> OptimizerFacts | None:
    """The state that ``optimizer`` keeps, seen on a small one of its kind and settings; None: that can't be made."""
    known = inspect.signature(type(optimizer)).parameters.keys() - _IMPLEMENTATIONS
    parameter = nn.Parameter(torch.zeros(3, 5))
    parameter.grad = torch.zeros(3, 5)
    try:
        small = type(optimizer)([parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
        small.step()
    except Exception:
        return None
    tensors = [value for value in small.state[parameter].values() if isinstance(value, Tensor)]
    return OptimizerFacts(
        slots=tuple(_slot_dtype(tensor, parameter) for tensor in tensors if tensor.shape == parameter.shape),
        fixed_bytes=sum(tensor.nbytes for tensor in tensors if tensor.shape != parameter.shape),
    )


def trace_optimizer(root: nn.Module, optimizer: Optimizer, mode: Any) -> OptimizerFacts:
    """The state that ``optimizer`` makes in a step on fake parameters of ``root``, and what the step allocates besides.

    Raises:
        TraceError: the step depends on data.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    with mode:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    live = LiveBytes([*root.parameters(), *root.buffers(), *gradients])
    live.begin("backward", "")
    try:
        with mode, live:
            optimizer.step()
        live.finish()
    except Exception as error:
        raise TraceError(explained(error, live.last_operation)) from error
    finally:
        optimizer.zero_grad(set_to_none=True)
    slots: dict[str, torch.dtype | None] = {}
    fixed = unsharded = total = 0
    for parameter in parameters:
        tensors = {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor)}
        same = {k: v for k, v in tensors.items() if v.shape == parameter.shape and parameter.ndim}
        slots |= {name: _slot_dtype(slot, parameter) for name, slot in same.items()}
        small = sum(slot.nbytes for name, slot in tensors.items() if name not in same and not slot.ndim)
        unsharded += sum(slot.nbytes for name, slot in tensors.items() if name not in same and slot.ndim)
        fixed = max(fixed, small)
        total += sum(slot.nbytes for slot in tensors.values())
    stepped = sum(p.nbytes for p in parameters)
    peak = live.segments[0].activations - total
    return OptimizerFacts(
        slots=tuple(slots.values()),
        fixed_bytes=fixed,
        unsharded_bytes=unsharded,
        temporary=max(0.0, peak / stepped) if stepped else 0.0,
    )


def _slot_dtype(slot: Tensor, parameter: Tensor) -> torch.dtype | None:
    return None if slot.dtype == parameter.dtype else slot.dtype
