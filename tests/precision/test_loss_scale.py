"""How the loss scale moves, and that scaling back is exact and finds an overflow wherever it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from lightning_shard.errors import CheckpointMismatchError, DataError, PrecisionError
from lightning_shard.precision.loss_scale import (
    LARGEST,
    LossScaler,
    LossScaleState,
    LossScaling,
    next_state,
    state_from_dict,
)
from lightning_shard.tensors.clipping import gradients_of
from lightning_shard.tensors.flat import local
from tests.harness import run_distributed


def scales(scaling: LossScaling, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow."""
    state, seen = LossScaler(scaling).state, []
    for letter in overflows:
        state = next_state(scaling, state, overflow=letter == "x")
        seen.append(state.scale)
    assert state.skipped == overflows.count("x")
    return seen


def test_growth_and_backoff() -> None:
    torchs = torch.amp.GradScaler("cpu")
    assert LossScaling().initial == torchs.get_scale() == 2.0**16
    assert LossScaling().growth_interval == torchs.get_growth_interval() == 2000
    scaling = LossScaling(initial=16.0, growth_interval=3)
    # An overflow starts the count anew.
    assert scales(scaling, "..." + "..x" + "..." + "x") == [16, 16, 32, 32, 32, 16, 16, 16, 32, 16]
    factors = LossScaling(initial=16.0, growth_interval=1, growth_factor=4.0, backoff_factor=0.125)
    assert scales(factors, ".x") == [64, 8]


def test_hysteresis() -> None:
    scaling = LossScaling(initial=16.0, growth_interval=3, hysteresis=2)
    # The first overflow is forgiven, the next ones are not, until the scale has grown.
    assert scales(scaling, "x.xx" + "..." + "xx") == [16, 16, 8, 4, 4, 4, 8, 8, 4]


def test_bounds() -> None:
    with pytest.raises(DataError, match="at the smallest loss scale, 4, after 2 skipped steps"):
        scales(LossScaling(initial=16.0, minimum=4.0), "xxx")
    high = LossScaling(initial=LARGEST / 2, growth_interval=1)
    assert scales(high, "...") == [LARGEST] * 3
    assert torch.isfinite(torch.tensor(LARGEST, dtype=torch.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial": 1000.0}, "loss_scale.initial is 1000.0, but must be a power of two"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0 and loss_scale.backoff_factor 0.5"),
        ({"growth_interval": 0}, "loss_scale.growth_interval is 0, but must be 1 or more"),
        ({"initial": 2.0, "minimum": 4.0}, "loss_scale.minimum is 4.0, but loss_scale.initial is 2.0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        LossScaling(**settings)


def test_the_state_in_a_checkpoint() -> None:
    state = LossScaleState(scale=0.25, good_steps=7, overflows_left=2, skipped=3)
    assert state_from_dict(asdict(state)) == state
    with pytest.raises(CheckpointMismatchError, match="has the keys _growth_tracker, backoff_factor"):
        state_from_dict(torch.amp.GradScaler("cpu").state_dict())


def _unscale() -> list[tuple[bool, bool]]:
    """By overflow and its place: whether it was found, and whether gradients are those before scaling, bitwise."""
    return [_unscaled(None, ""), *(_unscaled(o, where) for o in (torch.inf, torch.nan) for where in ("whole", "cut"))]


def _unscaled(overflow: float | None, where: str) -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    scaler = LossScaler(LossScaling(initial=2.0**20))
    # Odd sizes, so that shards are uneven and rank 1 has none of the last.
    originals = {"whole": torch.randn(5, generator=generator), "cut": torch.randn(3, 2, generator=generator)}
    originals["single"] = torch.randn(1, 4, generator=generator) * 1e-30
    parameters = {
        "whole": nn.Parameter(originals["whole"]),
        "cut": nn.Parameter(distribute_tensor(originals["cut"], mesh, [Shard(0)])),
        "single": nn.Parameter(distribute_tensor(originals["single"], mesh, [Shard(0)])),
        "copied": nn.Parameter(distribute_tensor(originals["cut"], mesh, [Replicate()])),
        "without": nn.Parameter(torch.ones(1)),
    }
    for name, parameter in parameters.items():
        if name != "without":
            parameter.grad = parameter.detach().clone() * scaler.state.scale
    before = {n: p.detach().clone() for n, p in parameters.items()}
    if overflow is not None and torch.distributed.get_rank() == 1:
        local(parameters[where].grad)[0] = overflow  # type: ignore[arg-type]
    found = _scaled_back(scaler, parameters.values())
    same = all(torch.equal(local(p.grad), local(before[n])) for n, p in parameters.items() if p.grad is not None)
    return found, same


def _scaled_back(scaler: LossScaler, parameters: Iterable[nn.Parameter]) -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    return scaler.unscale_gradients(optimizer, lambda _: gradients_of(parameters), device=torch.device("cpu"))


def test_scaling_back_is_exact_and_an_overflow_on_one_rank_is_found_on_both() -> None:
    expected = [(False, True), *[(True, True)] * 4], [(False, True), *[(True, False)] * 4]
    assert run_distributed(_unscale, 2) == [*expected]
