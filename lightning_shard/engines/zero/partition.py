"""Sharding a module for stage 3, one submodule at a time, so that no rank ever holds the full model in any dtype.

DeepSpeed's own way is to cast a full module, or to build it under ``zero.Init`` in the compute dtype; both round the
values that the masters are to begin with. Here each parameter is full for a moment in the dtype that it was loaded in;
the rank copies its shard of that, casts the parameter and lets DeepSpeed shard it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.zero import layout, swapping
from lightning_shard.engines.zero.values import Loaded, is_kept
from lightning_shard.tensors.flat import FlatSlice
from lightning_shard.tensors.names import parameter_names


def partition(
    root: nn.Module, *, device: torch.device, compute: torch.dtype, seed: int, config: Mapping[str, Any]
) -> Loaded:
    """Shard every parameter under ``root`` and move its buffers. All ranks call it. What an earlier run or
    ``deepspeed.zero.Init`` has sharded is only cast; else values of rank 0 win, or follow from ``seed`` on the meta
    device. Returns this rank's shards, on the host, of what the cast to ``compute`` rounded. MaterializationError comes
    ahead.
    """
    import deepspeed

    materializer = Materializer(root, device=device, seed=seed)
    names = parameter_names(root)
    init = deepspeed.zero.Init(config_dict_or_path=dict(config), dtype=compute)
    swapping.read_once(init.param_swapper)
    if config["zero_optimization"].get("memory_efficient_linear"):
        # DeepSpeed's default where it shards by itself; here only where the configuration asks for it.
        init._enable_mem_efficient_linear()
    loaded: Loaded = {}
    for module, fqn in materializer.fqns.items():
        materializer.fill([module])
        for name, parameter in module.named_parameters(recurse=False):
            # What was on the meta device is another one now.
            known = names.setdefault(parameter, f"{fqn}.{name}".lstrip("."))
            _shard_parameter(parameter, known, device, compute, init, loaded)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
        if module not in materializer.initializers:
            broadcast_from_rank_0(module.buffers(recurse=False))
    return loaded


@torch.no_grad()
def _shard_parameter(
    parameter: Any, fqn: str, device: torch.device, compute: torch.dtype, init: Any, loaded: Loaded
) -> None:
    if layout.is_partitioned(parameter):
        swapping.take(parameter)
        _cast_shard(parameter, fqn, compute, loaded)
        swapping.give(parameter, init.param_swapper)
        return
    parameter.data = parameter.data.to(device)
    broadcast_from_rank_0([parameter])
    full = parameter.detach()
    if parameter.is_floating_point():
        parameter.data = parameter.data.to(compute)
    # Without the broadcast of `Init`, which fails for parameters without a dimension.
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()
    if is_kept(parameter, full, compute):
        start, length = layout.own_range(parameter)
        loaded[fqn] = FlatSlice(full.reshape(-1)[start : start + length].to("cpu", copy=True), start)


def _cast_shard(parameter: Any, fqn: str, compute: torch.dtype, loaded: Loaded) -> None:
    shard = parameter.ds_tensor
    if not shard.is_floating_point() or shard.dtype == compute:
        return
    if is_kept(parameter, shard, compute):
        start, length = layout.own_range(parameter)
        loaded[fqn] = FlatSlice(shard.detach()[:length].to("cpu", copy=True), start)
    shard.data = shard.data.to(compute)
    parameter.data = parameter.data.to(compute)
