"""The one user of DistributedDataParallel's undocumented parts.

Backward from inside a step (manual optimization) starts before DDP's forward ends, which is where it prepares for one.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.private_names import require

require(
    DistributedDataParallel,
    "_build_params_for_reducer _remove_autograd_hooks _set_params_and_buffers_to_ignore_for_model",
    tested="torch 2.11 to 2.13",
)
require(dist.Reducer, "_autograd_hook _delay_all_reduce _rebuild_buckets", tested="torch 2.11 to 2.13")


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Reduce zeros once, so that the first step has the buckets of all later ones. All ranks call it.

    DDP reduces its first backward pass in one bucket and rebuilds the buckets after it. A resumed run would thereby sum
    its first step in another order than the run that never stopped, which shows from 3 ranks on. No autograd node of a
    parameter is run, so that nobody's hooks see the zeros. Where unused parameters are looked for, nothing is rebuilt;
    a static graph is recorded in the first pass, which has to be a real one.
    """
    parameters, sparse = wrapped._build_params_for_reducer()
    if wrapped.find_unused_parameters or wrapped.static_graph or any(sparse):
        return
    reducer: Any = wrapped.reducer

    def ready(_: Tensor) -> None:
        for index in reversed(range(len(parameters))):
            reducer._autograd_hook(index)

    reducer.prepare_for_backward([])
    trigger = torch.zeros((), requires_grad=True)
    trigger.register_hook(ready)
    trigger.backward()
    for parameter in parameters:
        parameter.grad = None
    reducer._rebuild_buckets()


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
