"""Gradients under ZeRO are no attribute of parameters: changes are refused, and what only reads is told so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.engines.zero.written import WatchedUses
from lightning_shard.errors import ConfigurationError


def halves(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def divides(parameter: Tensor) -> None:
    for each in (parameter,):
        if each.grad is not None:
            each.grad /= 2


def assigns(parameter: Tensor) -> None:
    parameter.grad = torch.zeros_like(parameter)


def drops(parameter: Tensor) -> None:
    parameter.grad = None


def clips(parameter: Tensor) -> None:
    nn.utils.clip_grad_norm_([parameter], 1.0)


def measures(parameter: Tensor) -> Any:
    return parameter.grad is not None and parameter.grad.norm() == 0


def counts(parameter: Tensor) -> int:
    return sum(each.grad is not None for each in (parameter,))


def uses_of(parameter: Tensor) -> WatchedUses:
    return WatchedUses("zero(stage=1)", lambda: {parameter: "net.weight"})


@pytest.mark.parametrize("change", [halves, divides, assigns, drops, clips])
def test_a_change_is_refused(change: Callable[[Tensor], Any]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    where = r"test_gradient_uses.py:\d+ uses .grad of net.weight"
    with uses_of(parameter), pytest.raises(ConfigurationError, match=where):
        change(parameter)


@pytest.mark.parametrize("read", [measures, counts])
def test_what_only_reads_is_told_once(read: Callable[[Tensor], Any]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    with uses_of(parameter) as uses, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not read(parameter)
        assert uses is not None
    assert len(caught) == 1
    assert "uses .grad of net.weight, but under zero(stage=1) it is None" in str(caught[0].message)


def test_other_tensors_have_gradients() -> None:
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with uses_of(parameter), warnings.catch_warnings():
        warnings.simplefilter("error")
        other.sum().backward()
        halves(other)
        torch.optim.SGD([parameter], lr=1.0).zero_grad()
    assert torch.equal(other.grad, torch.full((2,), 0.5))  # type: ignore[arg-type]
