"""Quantised state is saved as the plain tensors inside, by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.checkpoint.optimizer_state import optimizer_states, sharded_names


def test_quantised_state_is_saved_as_the_tensors_inside() -> None:
    ao = pytest.importorskip("torchao.optim")
    net = nn.Linear(64, 64)
    optimizer = ao.AdamW8bit(net.parameters())
    net(torch.ones(64)).sum().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    found = {(n.fqn, n.slot): t.dtype for n, t in optimizer_states([optimizer], sharded_names(net))[0].items()}
    assert found["weight", "exp_avg.codes"] == torch.uint8
    assert found["weight", "exp_avg.scale"] == found["weight", "exp_avg_sq.qmap"] == torch.float32
    # A bias has too few elements to be quantised.
    assert found["bias", "exp_avg"] == torch.float32
