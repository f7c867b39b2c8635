"""What an optimizer needs is seen by stepping copies, and neither the optimizer nor random numbers notice."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_shard.engines import dtensor_refusals
from lightning_shard.engines.optimizer_probe import Needs, probe, rests_at_zero
from lightning_shard.engines.owner_steps import OwnerSteps
from lightning_shard.errors import ConfigurationError
from tests.harness import run_distributed
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


class Scattering(optim.SGD):
    """Elementwise, by an operator for which DTensors have no sharding strategy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.masked_scatter_(parameter.isnan(), torch.zeros_like(parameter))
        return super().step(closure)


class ScatteringOnShards(Scattering):
    """Uses the operator on shards and not on replicas, as Rprop's index writes were refused before torch 2.15."""

    def step(self, closure: Any = None) -> Any:
        sharded = any(each.is_shard() for p in self.param_groups[0]["params"] for each in getattr(p, "placements", ()))
        return super().step(closure) if sharded else optim.SGD.step(self, closure)


class Projecting(Optimizer):
    """As AdamP: without its part along the parameter where there is next to none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            step = p.grad + 0.1 * p
            if torch.cosine_similarity(p.grad.view(-1), p.view(-1), dim=0).abs() < 1e-3 and p.ndim > 1:
                step -= p * (p * step).sum() / p.square().sum()
            p.sub_(0.1 * step)


class DecayedTogether(Optimizer):
    """As AdamS: weight decay by the mean size of all gradients, which changes the last digits."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = self.param_groups[0]["params"]
        size = torch.cat([p.grad.view(-1) for p in every]).square().mean().sqrt()
        for p in every:
            p.mul_(1 - 1e-6 / size).sub_(0.1 * p.grad)


def test_parameters_that_stage_3_emptied_are_on_no_device() -> None:
    class Unseen(optim.AdamW):
        """What the probes of this process found of AdamW does not count."""

    assert not probed(Unseen(nn.Linear(4, 4, device="meta").parameters()))


ELEMENTWISE: list[Any] = [
    optim.AdamW,
    lambda p: optim.Adagrad(p, fused=True),
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: optim.AdamW(p, lr=0.0),
    lambda p: Wrapping(optim.Adam(p)),
]


@pytest.mark.parametrize("make", ELEMENTWISE, ids=["adamw", "fused", "momentum", "begins at 0", "wrapped"])
def test_elementwise_optimizers_need_shards(make: Any) -> None:
    assert not probed(make(parameters()))


class Squaring(Noisy):
    """Has a matrix of as many rows and columns as a parameter has elements, for which many have no memory."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.numel() > 1000 for group in self.param_groups for p in group["params"]):
            raise MemoryError
        super().step(closure)


FULL: list[Any] = [
    Lamb,
    lambda p: Lamb(p, lr=0.0),
    optim.Adafactor,
    lambda p: optim.Muon(p[:1]),
    lambda p: Wrapping(Lamb(p)),
    Projecting,
    # On a CPU torch rounds a tensor's last elements, which fill no vector, otherwise than the others.
    lambda p: optim.AdamW(p, fused=True),
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
]


@pytest.mark.parametrize(
    "make",
    FULL,
    ids=["lamb", "begins at 0", "adafactor", "muon", "wrapped", "projecting", "fused adamw", "fused sgd"],
)
def test_others_need_full_parameters(make: Any) -> None:
    assert probed(make(parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NormalizedTogether, "NormalizedTogether couples parameters"),
        (DecayedTogether, "DecayedTogether couples parameters"),
        (optim.LBFGS, "LBFGS couples parameters"),
        (Noisy, "Noisy draws random numbers"),
        (Squaring, "Squaring draws random numbers"),
        (Holding, "Holding can't be tried .* its attribute masters holds the parameters"),
    ],
)
def test_what_no_rank_can_step_in_part_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        probed(make(parameters()))


class InBlocks(Optimizer):
    """Gradient descent with signs, scaled by blocks of 2,048 elements where there are only full ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            blocks = p.grad.reshape(-1, 2048 if p.numel() % 2048 == 0 else 1)
            self.state[p] = {"scale": blocks.abs().amax(1)}
            p.sub_((blocks.sign() * self.state[p]["scale"][:, None]).view_as(p), alpha=0.1)


class RoundsShort(optim.SGD):
    """As a kernel that treats what fills no vector apart."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.numel() < 8):
            p *= 1.01


def test_what_is_rounded_otherwise_needs_full_parameters_where_bits_count() -> None:
    assert probed(RoundsShort(parameters()))
    assert probed(RoundsShort(parameters()), dtype=BF16, aligned=True)
    assert not probed(RoundsShort(parameters()), dtype=BF16)


class Roots(optim.SGD):
    """As Shampoo, whose matrices have a row and a column for each element of a vector."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            assert p.numel() < 1000, "its matrix is too large"
            p -= torch.linalg.matrix_exp(torch.outer(p.grad.view(-1), p.grad.view(-1)) / p.numel()).sum(1).view_as(p)


@pytest.mark.matrix
def test_what_shows_on_few_elements_is_not_tried_on_many() -> None:
    assert probed(Roots(parameters()))


class AsksForMany(optim.SGD):
    """Has no kernel for short tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.numel() > 64 for group in self.param_groups for p in group["params"])
        super().step(closure)


def test_what_steps_no_short_tensors_needs_full_parameters() -> None:
    assert probed(AsksForMany(parameters()))


def test_states_in_full_blocks_need_full_parameters() -> None:
    assert probed(InBlocks(parameters()))


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantised_states_of_torchao_need_full_parameters(kind: str) -> None:
    ao = pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        assert probed(getattr(ao, kind)([nn.Parameter(torch.zeros(4))]))


def test_one_rank_may_couple_what_it_steps_alone() -> None:
    assert probed(NormalizedTogether(parameters()), alone=True)
    assert not probed(optim.LBFGS(parameters()), alone=True)


def test_noise_is_allowed_in_low_memory() -> None:
    # Optimizers that round bf16 stochastically draw numbers; no other engine's numbers are promised there.
    assert not probed(Noisy(parameters()), dtype=BF16)
    with pytest.raises(ConfigurationError, match="draws random numbers"):
        probed(Noisy(parameters()), dtype=BF16, aligned=True)


@pytest.mark.parametrize("make", [optim.AdamW, Lamb, optim.LBFGS, FULL[-1]], ids=["adamw", "lamb", "lbfgs", "wrapped"])
def test_nothing_is_left_of_a_probe(make: Any) -> None:
    stepped = parameters()
    optimizer, random = make(stepped), torch.get_rng_state()
    before = [p.detach().clone() for p in stepped]
    described = copy.deepcopy(optimizer.state_dict())
    for parameter in stepped:
        parameter.grad = torch.ones_like(parameter)
    with suppress(ConfigurationError):
        probed(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(stepped, before, strict=True))
    assert optimizer.state_dict() == described
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "rests"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), False),
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0), False),
        (lambda p: torch.optim.AdamW(p, lr=0.0), False),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.0)), False),
    ],
    ids=["sgd", "momentum", "decay", "adamw", "warm-up", "warm-up in a tensor"],
)
def test_whether_gradients_of_zero_change_nothing(make: Any, rests: bool) -> None:
    assert rests_at_zero(make([torch.nn.Parameter(torch.ones(2, 2))])) is rests


class AsksForClosure(optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_what_asks_for_a_closure_can_not_be_tried_without() -> None:
    assert not probed(AsksForClosure(parameters()))
    assert not rests_at_zero(AsksForClosure(parameters()))


def _probed_on_shards() -> list[bool]:
    undo = dtensor_refusals.install_refusals()  # as in a fit
    try:
        return _probed_apart()
    finally:
        undo()


def _probed_apart() -> list[bool]:
    mesh = init_device_mesh("cpu", (1,))
    shards = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in parameters()]
    return [probed(make(shards)) for make in (optim.AdamW, Scattering)]


def _probed_by_placement() -> list[bool]:
    mesh, full = init_device_mesh("cpu", (1,)), []
    for placement in (Replicate(), Shard(0)):
        shards = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))]
        full.append(probed(ScatteringOnShards(shards)))
    return full


def test_what_one_placement_takes_another_may_refuse() -> None:
    assert run_distributed(_probed_by_placement, 1) == [[False, True]]


def test_an_elementwise_optimizer_whose_operators_dtensors_refuse_needs_full_parameters() -> None:
    assert run_distributed(_probed_on_shards, 1) == [[False, True]]


class TwoKinds(optim.SGD):
    """As ScheduleFree, has values for training and for evaluation."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class TrainsFirst(TwoKinds):
    """As schedulefree's, made for evaluation; the user calls ``train`` when training begins."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def step(self, closure: Any = None) -> Any:
        assert self.trains, "not in train mode"
        return super().step(closure)


def test_an_optimizer_that_steps_in_its_train_mode_alone_is_tried_in_that() -> None:
    optimizer = TrainsFirst(parameters(), lr=0.1)
    assert not probed(optimizer)
    assert not optimizer.trains


def test_values_for_evaluation_of_what_owners_step_are_refused() -> None:
    optimizer: Any = TwoKinds(parameters())
    with pytest.raises(ConfigurationError, match="TwoKinds writes values for training and for evaluation"):
        OwnerSteps(optimizer, [], step=optimizer.step, group=None, device=torch.device("cpu"))  # type: ignore[arg-type]


def test_an_optimizer_that_can_not_be_tried_steps_full_parameters_where_each_rank_has_all() -> None:
    class Untried(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("made elsewhere")

    assert probed(Untried(parameters(), lr=0.1), alone=True)


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
        (lambda p: AsksForClosure(p), Needs(loss=True)),
        (optim.LBFGS, Needs(loss=True, again=True)),
        (Sharpness, Needs(loss=True, again=True)),
        (Noisy, Needs(full=True, draws=True)),
    ],
    ids=["adamw", "polyak", "asks", "lbfgs", "sharpness", "noisy"],
)
def test_what_a_step_takes_beside_gradients(make: Any, needs: Needs) -> None:
    assert probe(make(parameters()), dtype=FP32, aligned=True, alone=True) == needs
