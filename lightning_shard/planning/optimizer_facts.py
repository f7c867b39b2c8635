"""An optimizer's step on tensors without data: its state, and what it needs on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.planning.facts import OptimizerFacts
from lightning_shard.planning.live_bytes import LiveBytes, live_tensors
from lightning_shard.planning.memory_trace import TraceError, explained


def trace_optimizer(root: nn.Module, optimizer: torch.optim.Optimizer, mode: Any) -> OptimizerFacts:
    """The state that an optimizer makes in a step on fake parameters, and what the step needs on its way.

    Raises:
        TraceError: the step depends on data.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    with mode:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    live = LiveBytes([*live_tensors(root), *(p.grad for p in parameters if p.grad is not None)])
    live.begin("backward", "")
    try:
        with mode, live:
            optimizer.step()
        live.finish()
    except Exception as error:
        raise TraceError(explained(error, live.last)) from error
    finally:
        optimizer.zero_grad(set_to_none=True)
    return _slots(optimizer, parameters, root, live)


def _slots(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], root: nn.Module, live: LiveBytes
) -> OptimizerFacts:
    names = {id(p): fqn for fqn, p in root.named_parameters()}
    like: dict[str, torch.dtype | None] = {}
    uncut: dict[str, int] = {}
    fixed = state = 0
    for parameter in parameters:
        small = 0
        for name, slot in optimizer.state.get(parameter, {}).items():
            if not isinstance(slot, Tensor):
                continue
            state += slot.numel() * slot.element_size()
            if slot.shape == parameter.shape and parameter.ndim:
                like[name] = None if slot.dtype == parameter.dtype else slot.dtype
            elif slot.ndim == 0:
                small += slot.element_size()
            else:
                fqn = names.get(id(parameter), "")
                uncut[fqn] = uncut.get(fqn, 0) + slot.numel() * slot.element_size()
        fixed = max(fixed, small)
    stepped = sum(p.numel() * p.element_size() for p in parameters)
    peak = live.segments[0].activations - state
    return OptimizerFacts(
        slots=tuple(like.values()),
        fixed_bytes=fixed,
        uncut=uncut,
        on_the_way=max(0.0, peak / stepped) if stepped else 0.0,
    )
