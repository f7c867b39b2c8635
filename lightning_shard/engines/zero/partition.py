"""Sharding a module for stage 3, one submodule at a time, so that no rank ever holds the whole in any dtype.

DeepSpeed's own way is to cast a module that is whole, or to build it under ``zero.Init`` in the compute dtype; both
round the values that the masters are to begin with. Here each parameter is whole for a moment in the dtype that it
was loaded in; the rank keeps its piece of that, casts the rest and lets DeepSpeed cut it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines.materialize import Created, find_initializers, materialize
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.zero import layout, swapping
from lightning_shard.engines.zero.masters import Kept, is_rounded


def partition(
    root: nn.Module, *, device: torch.device, compute: torch.dtype, seed: int, config: Mapping[str, Any]
) -> tuple[Kept, dict[Tensor, Tensor]]:
    """Shard every parameter under ``root`` and move its buffers. All ranks call it.

    A parameter that is cut already, by an earlier run or by the user's own ``deepspeed.zero.Init``, is cast alone.

    Args:
        root: whole, on the meta device, or cut; values of rank 0 win.
        device: where this rank computes.
        compute: dtype in which forward sees floating parameters.
        seed: the run's, for what is on the meta device.
        config: the whole DeepSpeed configuration.

    Returns:
        This rank's pieces of the parameters that the cast rounded; and the parameter that took the place of each one
        that was on the meta device.

    Raises:
        MaterializationError: before anything was changed.
    """
    import deepspeed

    initializers = find_initializers(root)
    fqns = {module: fqn for fqn, module in root.named_modules()}
    names = {id(p): fqn for fqn, p in root.named_parameters()}
    init = deepspeed.zero.Init(config_dict_or_path=dict(config), dtype=compute)
    swapping.read_once(init.param_swapper)
    if config["zero_optimization"].get("memory_efficient_linear"):
        # DeepSpeed's default where it cuts by itself; here only where the configuration asks for it.
        init._enable_mem_efficient_linear()
    created: Created = {}
    kept: Kept = {}
    made: dict[Tensor, Tensor] = {}
    for module, fqn in fqns.items():
        before = dict(module.named_parameters(recurse=False))
        materialize([module], device=device, seed=seed, fqns=fqns, initializers=initializers, created=created)
        for name, parameter in module.named_parameters(recurse=False):
            if before[name] is not parameter:
                made[before[name]] = parameter
                names[id(parameter)] = f"{fqn}.{name}" if fqn else name
            _cut_parameter(parameter, names[id(parameter)], device, compute, init, kept)
        _move_buffers(module, device)
        if module not in initializers:
            broadcast_from_rank_0(module.buffers(recurse=False))
    return kept, made


@torch.no_grad()
def _cut_parameter(parameter: Any, fqn: str, device: torch.device, compute: torch.dtype, init: Any, kept: Kept) -> None:
    if layout.is_cut(parameter):
        swapping.bring(parameter)
        _cast_cut(parameter, fqn, compute, kept)
        swapping.place(parameter, init.param_swapper)
        return
    parameter.data = parameter.data.to(device)
    broadcast_from_rank_0([parameter])
    whole = parameter.detach()
    if parameter.is_floating_point():
        parameter.data = parameter.data.to(compute)
    init._convert_to_zero_parameters([parameter])
    if is_rounded(whole, compute):
        start, length = layout.own_range(parameter)
        kept[fqn] = whole.reshape(-1)[start : start + length].clone(), start


def _cast_cut(parameter: Any, fqn: str, compute: torch.dtype, kept: Kept) -> None:
    piece = parameter.ds_tensor
    if not piece.is_floating_point() or piece.dtype == compute:
        return
    if is_rounded(piece, compute):
        start, length = layout.own_range(parameter)
        kept[fqn] = piece.detach()[:length].clone(), start
    piece.data = piece.data.to(compute)
    parameter.data = parameter.data.to(compute)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.device != device:
            setattr(module, name, buffer.to(device))


def replace_parameters(optimizers: Iterable[torch.optim.Optimizer], made: Mapping[Tensor, Tensor]) -> None:
    """Let optimizers without state step the parameters that took the place of others."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(parameter, parameter) for parameter in group["params"]]
