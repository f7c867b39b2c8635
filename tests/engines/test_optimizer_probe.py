"""An optimizer's needs are found by stepping copies, which leave the optimizer and random numbers alone."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_shard.engines.optimizer_probe import Needs, probe, rests_at_zero
from lightning_shard.engines.owner_steps import OwnerSteps
from lightning_shard.errors import ConfigurationError
from tests.optimizers import Lamb, Noisy, NormalizedTogether

FP32, BF16 = torch.float32, torch.bfloat16


def probed(optimizer: Optimizer, *, dtype: torch.dtype = FP32, aligned: bool = False, alone: bool = False) -> bool:
    """Whether it needs full parameters."""
    return probe(optimizer, dtype=dtype, aligned=aligned, alone=alone).full


def parameters() -> list[nn.Parameter]:
    return list(nn.Linear(4, 4).parameters())


class Wrapping(Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Holding(optim.SGD):
    """Keeps its parameters in an attribute too."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.masters = {0: params}


class Own(optim.SGD):
    """Steps as SGD, and then changes each parameter by ``extra``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
            self.extra(parameter, self.state[parameter])

    def extra(self, p: Any, state: dict[str, Any]) -> None: ...


class Later(Own):
    """Keeps sums over rows, which it applies from step 1,000 on, as preconditioners do."""

    class Sums:
        rows: Any = 0.0

    def extra(self, p: Any, state: dict[str, Any]) -> None:
        sums = state.setdefault("sums", self.Sums())
        sums.rows = sums.rows + p.grad.sum(-1, keepdim=True)
        if state["steps"] > 1000:
            p /= 1 + sums.rows


class RoundsShort(Own):
    """As a kernel that treats elements apart that fill no vector."""

    def extra(self, p: Any, state: dict[str, Any]) -> None:
        if p.numel() < 8:
            p *= 1.01


class TrainsFirst(optim.SGD):
    """As schedulefree's, has values for training and for evaluation, and steps in its train mode alone."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None: ...

    def step(self, closure: Any = None) -> Any:
        assert self.trains, "not in train mode"
        return super().step(closure)


ELEMENTWISE: dict[str, Any] = {
    "adamw": optim.AdamW,
    "fused adagrad": lambda p: optim.Adagrad(p, fused=True),
    "lr of 0": lambda p: optim.AdamW(p, lr=0.0),
    "wrapped": lambda p: Wrapping(optim.Adam(p)),
    "train mode": TrainsFirst,
}
FULL: dict[str, Any] = {
    "lamb, lr of 0": lambda p: Lamb(p, lr=0.0),
    "adafactor": optim.Adafactor,
    "muon": lambda p: optim.Muon(p[:1]),
    "wrapped": lambda p: Wrapping(Lamb(p)),
    # On a CPU torch rounds a tensor's last elements, which fill no vector, otherwise than the others.
    "fused": lambda p: optim.AdamW(p, fused=True),
    "rounds short": RoundsShort,
    "later": Later,
}


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_optimizers_need_shards(make: Any) -> None:
    optimizer = make(parameters())
    assert not probed(optimizer)
    assert not getattr(optimizer, "trains", False), "the user's own keeps its mode"


@pytest.mark.parametrize("make", FULL.values(), ids=FULL)
def test_others_need_full_parameters(make: Any) -> None:
    assert probed(make(parameters()))


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8"])
def test_quantised_states_of_torchao_need_full_parameters(kind: str) -> None:
    ao = pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        assert probed(getattr(ao, kind)([nn.Parameter(torch.zeros(4))]))


def test_parameters_that_stage_3_emptied_are_on_no_device() -> None:
    class Unseen(optim.AdamW):
        """Unknown to earlier probes of this process."""

    assert not probed(Unseen(nn.Linear(4, 4, device="meta").parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NormalizedTogether, "NormalizedTogether couples parameters"),
        (optim.LBFGS, "LBFGS couples parameters"),
        (Noisy, "Noisy draws random numbers"),
        (Holding, "Holding can't be tried .* its attribute masters holds the parameters"),
    ],
)
def test_optimizers_that_no_rank_can_step_in_part_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        probed(make(parameters()))


def test_bits_and_noise_count_in_fp32_and_under_aligned() -> None:
    assert probed(RoundsShort(parameters()), dtype=BF16, aligned=True)
    assert not probed(RoundsShort(parameters()), dtype=BF16)
    assert not probed(Noisy(parameters()), dtype=BF16)
    with pytest.raises(ConfigurationError, match="draws random numbers"):
        probed(Noisy(parameters()), dtype=BF16, aligned=True)


def test_a_rank_with_all_parameters_may_couple_them_or_step_untried() -> None:
    class Untried(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("made elsewhere")

    assert probed(NormalizedTogether(parameters()), alone=True)
    assert probed(Untried(parameters(), lr=0.1), alone=True)
    assert not probed(optim.LBFGS(parameters()), alone=True)


@pytest.mark.parametrize(
    "make", [optim.AdamW, Lamb, optim.LBFGS, FULL["wrapped"]], ids=["adamw", "lamb", "lbfgs", "wrapped"]
)
def test_nothing_is_left_of_a_probe(make: Any) -> None:
    probed_ones = parameters()
    optimizer, random = make(probed_ones), torch.get_rng_state()
    before = [p.detach().clone() for p in probed_ones]
    described = copy.deepcopy(optimizer.state_dict())
    for parameter in probed_ones:
        parameter.grad = torch.ones_like(parameter)
    with suppress(ConfigurationError):
        probed(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(probed_ones, before, strict=True))
    assert optimizer.state_dict() == described
    assert torch.equal(random, torch.get_rng_state())


class AsksForClosure(optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Sharpness(optim.SGD):
    """As SAM: the loss is computed again, of other values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=0.1)
        closure()
        return super().step()


class Polyak(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = 1.0 if closure is None else float(closure())
        self.param_groups[0]["lr"] = 0.1 * loss
        return super().step()


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (optim.AdamW, Needs()),
        (Polyak, Needs(loss=True)),
        (AsksForClosure, Needs(loss=True)),
        (optim.LBFGS, Needs(loss=True, again=True)),
        (Sharpness, Needs(loss=True, again=True)),
        (Noisy, Needs(full=True, draws=True)),
    ],
)
def test_inputs_of_a_step_besides_gradients(make: Any, needs: Needs) -> None:
    assert probe(make(parameters()), dtype=FP32, aligned=True, alone=True) == needs


@pytest.mark.parametrize(
    ("make", "rests"),
    [
        (lambda p: optim.SGD(p, lr=0.1), True),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1), False),
        (AsksForClosure, False),
    ],
    ids=["sgd", "momentum", "decay", "closure"],
)
def test_whether_gradients_of_zero_change_nothing(make: Any, rests: bool) -> None:
    assert rests_at_zero(make([nn.Parameter(torch.ones(2, 2))])) is rests


def test_values_for_evaluation_of_optimizers_stepped_at_owners_are_refused() -> None:
    optimizer: Any = TrainsFirst(parameters())
    with pytest.raises(ConfigurationError, match="TrainsFirst writes values for training and for evaluation"):
        OwnerSteps(optimizer, [], step=optimizer.step, group=None, device=torch.device("cpu"))  # type: ignore[arg-type]
