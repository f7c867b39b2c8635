"""Kinds of parameters that engines refuse, before anything is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.engines.refusals import refuse_kinds
from lightning_shard.errors import ConfigurationError


def test_kinds_that_can_not_be_sharded_are_all_named() -> None:
    module = nn.Module()
    module.lazy, module.table = nn.LazyLinear(2), nn.Embedding(4, 2, sparse=True)
    module.frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    module.phase, module.none = nn.Parameter(torch.zeros(2, dtype=torch.complex64)), nn.Parameter(torch.zeros(0, 2))
    with pytest.raises(ConfigurationError, match="ShardFSDPStrategy can't step") as caught:
        refuse_kinds(module, "ShardFSDPStrategy", empty=True)
    said = str(caught.value)
    for text in (
        "complex (use its real view, torch.view_as_real): phase",
        "without elements (register it as a buffer): none",
        "uninitialized (run a batch through the model in configure_model): lazy.weight, lazy.bias",
        "with sparse gradients (set sparse=False): table.weight.",
    ):
        assert text in said
    with pytest.raises(ConfigurationError) as caught:
        refuse_kinds(module, "ShardDeepSpeedStrategy(stage=2)", empty=False)
    assert "without elements" not in str(caught.value)
    refuse_kinds(module, "ShardFSDPStrategy", empty=True, ignored={*module.parameters()})
    refuse_kinds(module.frozen, "ShardFSDPStrategy", empty=True)
