"""Kinds of parameters that engines refuse, before anything is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.engines.module_checks import refuse_double, refuse_kinds
from lightning_shard.errors import ConfigurationError


def test_kinds_that_can_not_be_sharded_are_all_named() -> None:
    module = nn.Module()
    module.table = nn.Embedding(4, 2, sparse=True)
    module.clipped, module.scripted = nn.Embedding(4, 2, max_norm=1.0), torch.jit.script(nn.Linear(2, 2, bias=False))
    module.frozen = nn.Embedding(4, 2, sparse=True, max_norm=1.0).requires_grad_(False)
    module.phase, module.none = nn.Parameter(torch.zeros(2, dtype=torch.complex64)), nn.Parameter(torch.zeros(0, 2))
    with pytest.raises(ConfigurationError, match="ShardFSDPStrategy can't step") as caught:
        refuse_kinds(module, "ShardFSDPStrategy")
    said = str(caught.value)
    for text in (
        "complex (use its real view, torch.view_as_real): phase",
        "without elements (register it as a buffer): none",
        "renormalised in forward (clip a copy there in place of max_norm): clipped.weight",
        "of scripted modules (use the Python module, and compile: true): scripted.weight",
        "with sparse gradients (set sparse=False): table.weight",
    ):
        assert text in said
    refuse_kinds(module, "ShardFSDPStrategy", ignored={*module.parameters()})
    refuse_kinds(module.frozen, "ShardFSDPStrategy")


def test_fp64_parameters_are_refused_where_they_would_be_rounded() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).double().requires_grad_(False))
    with pytest.raises(ConfigurationError, match=r"^1\.weight, 1\.bias are fp64"):
        refuse_double(module, "ShardFSDPStrategy", torch.bfloat16)
    refuse_double(module[2], "ShardFSDPStrategy", torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"^weight, bias are fp64, but ShardFSDPStrategy has no wider"):
        refuse_double(module[2], "ShardFSDPStrategy", torch.float32)


def test_old_spectral_norms_are_refused_where_parameters_are_gathered_by_hooks() -> None:
    """Their hook runs ahead of ZeRO-3's, and a resumed run fails in its first backward."""
    kinds = (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm)
    module = nn.Sequential(*(kind(nn.Linear(4, 4)) for kind in kinds))
    refuse_kinds(module, "ShardFSDPStrategy")
    with pytest.raises(ConfigurationError, match=r"parametrizations\.spectral_norm\): 0\.weight_orig\. Change"):
        refuse_kinds(module, "ShardDeepSpeedStrategy(stage=3)", hooked=True)
