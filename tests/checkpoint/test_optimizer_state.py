"""State that a checkpoint can't give back is refused when it is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.checkpoint.module_state import sharded_names
from lightning_shard.checkpoint.optimizer_state import optimizer_states
from lightning_shard.errors import CheckpointError
from tests.engines.test_optimizer_probe import Quantised


def test_state_in_tensors_of_a_class_of_their_own_is_refused() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net.weight] = {"moment": torch.zeros(2, 3).as_subclass(Quantised)}
    with pytest.raises(CheckpointError, match="moment is a Quantised, a tensor of a class of its own"):
        optimizer_states([optimizer], sharded_names(net))
