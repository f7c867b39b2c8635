"""The one user of DistributedDataParallel's undocumented parts. Tested with torch 2.11 to 2.13.

Backward from inside a step (manual optimization) starts before DDP's forward ends, which is where it prepares for one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.private_names import require

require(
    DistributedDataParallel,
    "_remove_autograd_hooks _set_params_and_buffers_to_ignore_for_model",
    tested="torch 2.11 to 2.13",
)
require(dist.Reducer, "_delay_all_reduce _rebuild_buckets", tested="torch 2.11 to 2.13")


def prepare_for_backward(wrapped: DistributedDataParallel, loss: Tensor) -> None:
    """Make the reducer ready for a backward pass from ``loss``, as ``DistributedDataParallel._post_forward`` does."""
    if not (torch.is_grad_enabled() and wrapped.require_backward_grad_sync):
        wrapped.require_forward_param_sync = False
        return
    wrapped.require_forward_param_sync = True
    unused = wrapped.find_unused_parameters and not wrapped.static_graph
    # Without it torch asserts in the first pass that finds no unused parameters.
    wrapped.reducer._rebuild_buckets()
    wrapped.reducer.prepare_for_backward([loss] if unused else [])


def delay_all_reduce(wrapped: DistributedDataParallel) -> None:
    """Start the first reduction of a static graph, which DDP holds back until its own forward ends."""
    wrapped.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def remove_hooks(wrapped: DistributedDataParallel) -> None:
    """Let go of the module: the parameters' hooks outlive the wrapper as long as anything refers to it."""
    wrapped._remove_autograd_hooks()


def ignore_parameters(root: nn.Module, names: Iterable[str]) -> None:
    """Have DDP around ``root`` leave parameters out; what does it is documented in its source alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, list(names))
