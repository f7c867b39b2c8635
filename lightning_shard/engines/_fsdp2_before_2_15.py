"""Repairs of FSDP2 that torch has itself since 2.15. Delete this file when 2.14 is no longer supported.

Before 2.15 a parameter group keeps the sum over micro-batches apart from the gathered parameter's ``grad``, reduces
gradients of one dtype only, and reads the dtype of its reduction from the parameters that are trainable at first.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

IS_NEEDED = not hasattr(FSDPModule, "set_manual_backward_finalization")
"""Whether the installed torch is older than 2.15, which added this public method."""


def begin_sums(group: Any, wanted: Set[Tensor]) -> None:
    """Start the sums over micro-batches of ``wanted`` shards with zeros, in a group that has other sums. Gradients of
    the last micro-batch alone would have another dtype than the sums, and torch refuses to reduce both.
    """
    lacking = [parameter for parameter in group.fsdp_params if parameter.unsharded_accumulated_grad is None]
    for parameter in lacking if len(lacking) < len(group.fsdp_params) else ():
        full = getattr(parameter, "unsharded_param", None)
        if full is not None and parameter.sharded_param in wanted:
            dtype = parameter.reduce_dtype or full.dtype
            parameter.unsharded_accumulated_grad = torch.zeros(full.shape, dtype=dtype, device=full.device)


def expect_gradients(group: Any) -> None:
    """Give a group with only frozen parameters the dtype of its reduction, in case they are thawed."""
    shards = [parameter.sharded_param for parameter in group.fsdp_params]
    (dtype, trainable), *others = {(shard.dtype, shard.requires_grad) for shard in shards}
    if trainable or others or not dtype.is_floating_point:
        return
    # ``lazy_init`` reads the dtype from the parameters that are trainable at that moment.
    for shard in shards:
        shard.requires_grad_()
    group.lazy_init()
    for shard in shards:
        shard.requires_grad_(False)
