"""Optimizers while DeepSpeed has them."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from lightning_shard.engines.zero.running_engine import replaced_step


def test_a_step_that_was_replaced_keeps_no_optimizer_alive() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    with replaced_step(optimizer):
        # Of a callback, such as StochasticWeightAveraging, once the fit has begun.
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.0, 0.0]
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
