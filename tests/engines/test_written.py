"""Writes to parameters that no optimizer makes: as under torch's DDP, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.errors import ConfigurationError
from tests.engines.test_engine import Net, _fit
from tests.harness import run_distributed


class Student(Net):
    """Learns what the moving average of its own parameters says."""

    def __init__(self, idiom: str, inside: bool) -> None:
        super().__init__()
        self.teacher = Net().requires_grad_(False)
        self.idiom, self.inside = idiom, inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            self.update()
        with torch.no_grad():
            target = self.teacher(x)
        return super().forward(x) - target

    def after_step(self) -> None:
        if not self.inside:
            self.update()

    def update(self) -> None:
        own = [p for n, p in self.named_parameters() if not n.startswith("teacher")]
        for p, q in zip(own, self.teacher.parameters(), strict=True):
            if self.idiom == "set":
                q.data = 0.9 * q.data + 0.1 * p.data
            elif self.idiom == "data":
                q.data.mul_(0.9).add_(0.1 * p.data)
            else:
                with torch.no_grad():
                    q.lerp_(p, 0.1)


def _lost(names: list[str]) -> list[str]:
    """Idioms and engines whose numbers are not DDP's."""
    lost, before = [], vars(DTensor).get("data")
    for idiom in ("set", "data"):
        for inside in (False, True):
            kind = partial(Student, idiom, inside)
            (expected, _), *others = [_fit(name, 2, kind=kind) for name in names]
            moved = kind().state_dict()
            assert not any(torch.equal(expected[fqn], moved[fqn]) for fqn in expected), "nothing was written"
            for name, (found, _) in zip(names[1:], others, strict=True):
                if not all(torch.equal(found[fqn], expected[fqn]) for fqn in expected):
                    lost.append(f"{name}: {idiom}, {'in' if inside else 'outside of'} the step")
    assert vars(DTensor).get("data") is before, "torch's class is given back"
    return lost


def test_no_idiom_of_a_moving_average_is_lost() -> None:
    assert run_distributed(_lost, 2, ["torch_ddp", "fully_shard"]) == [[], []]


class Clipped(Net):
    """The weights of a critic, clipped after each step."""

    def __init__(self, idiom: str) -> None:
        super().__init__()
        self.idiom = idiom

    def after_step(self) -> None:
        weight = self.blocks[0][0].weight
        if self.idiom == "set":
            weight.data = weight.data.clamp(-0.1, 0.1)
        elif self.idiom == "data":
            weight.data.clamp_(-0.1, 0.1)
        else:
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)


IDIOMS = ("set", "data", "in place")


def _unclipped(names: list[str]) -> list[str]:
    lost = []
    for idiom in IDIOMS:
        expected, *others = (_fit(name, 3, kind=partial(Clipped, idiom))[0] for name in ["torch_ddp", *names])
        assert expected["blocks.0.0.weight"].abs().max() == torch.tensor(0.1)
        for name, found in zip(names, others, strict=True):
            if not all(torch.equal(found[fqn], expected[fqn]) for fqn in expected):
                lost.append(f"{name}: {idiom}")
    return lost


def test_weights_that_are_clipped_after_a_step_stay_clipped() -> None:
    assert run_distributed(_unclipped, 2, ["fully_shard", "zero_1", "zero_2"]) == [[], []]


class SetsFull(Net):
    def after_step(self) -> None:
        self.head.weight.data = torch.zeros(3, 6)


def _refused(precision: str, kind: type[Net], name: str = "fully_shard") -> str:
    with pytest.raises(ConfigurationError) as caught:
        _fit(name, 3, kind=kind, precision=precision)
    return str(caught.value)


class Monotone(Net):
    """Weights that its own forward keeps positive."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_pre_hook(lambda block, _: block[0].weight.data.clamp_(0))


def test_values_that_can_not_be_written_are_refused() -> None:
    for said in run_distributed(_refused, 2, "32-true", SetsFull):
        assert "parameter.data is set to a Tensor of (3, 6)" in said
    for said in run_distributed(_refused, 2, "bf16-mixed", partial(Student, "lerp", True)):
        assert "The step writes to teacher." in said
    for said in run_distributed(_refused, 2, "32-true", Monotone):
        assert "The step writes to blocks.0.0.weight while gathered" in said


class Late(Net):
    """Writes to weights in forward from the eleventh step on, by then to values that they have."""

    def __init__(self, idiom: str) -> None:
        super().__init__()
        self.idiom, self.calls = idiom, 0
        self.blocks[0].register_forward_pre_hook(self.write)

    def write(self, block: Any, _: Any) -> None:
        self.calls += 1
        weight = block[0].weight
        if self.calls <= 10:
            assert weight.data.norm() > 0, "a reading"
        elif self.idiom == "set":
            weight.data = weight.data.clone()
        elif self.idiom == "data":
            weight.data.clamp_(-10, 10)
        else:
            with torch.no_grad():
                weight.clamp_(-10, 10)


def _late(name: str) -> None:
    for idiom in IDIOMS:
        with pytest.raises(ConfigurationError, match=r"The step writes to blocks\.0\.0\.weight"):
            _fit(name, 11, kind=partial(Late, idiom))
        _fit(name, 10, kind=partial(Late, idiom))


@pytest.mark.parametrize("name", ["fully_shard", "zero_3"])
def test_writes_that_begin_late_are_refused(name: str) -> None:
    run_distributed(_late, 2, name)


@pytest.mark.parametrize(("name", "precision"), [("zero_3", "32-true"), ("zero_2", "bf16-mixed")])
def test_writes_that_deepspeed_would_lose_are_refused(name: str, precision: str) -> None:
    for idiom in IDIOMS:
        for said in run_distributed(_refused, 2, precision, partial(Clipped, idiom), name):
            assert "blocks.0.0.weight was written to between two steps" in said
