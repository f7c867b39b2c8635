"""Writes to parameters that no optimizer makes: to shards between steps as under torch's DDP, to copies refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.engines.external_writes import ExternalWriteCheck, ForeignStepCheck, assignable_data
from lightning_shard.errors import ConfigurationError
from tests.engines.test_engine import Net, _fit
from tests.harness import run_distributed

IDIOMS = ("set", "data", "in place")


def write(idiom: str, parameter: Any, by: Callable[[Tensor], Tensor]) -> None:
    if idiom == "set":
        parameter.data = by(parameter.data)
    elif idiom == "data":
        parameter.data.copy_(by(parameter.data))
    else:
        with torch.no_grad():
            parameter.copy_(by(parameter))


class Student(Net):
    """Learns what the moving average of its own parameters says."""

    def __init__(self, idiom: str, inside: bool = False) -> None:
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
            write(self.idiom, q, lambda value, p=p: 0.9 * value + 0.1 * p.data)  # type: ignore[misc]


class Clipped(Net):
    """The weights of a critic, clipped after each step."""

    def __init__(self, idiom: str) -> None:
        super().__init__()
        self.idiom = idiom

    def after_step(self) -> None:
        write(self.idiom, self.blocks[0][0].weight, lambda value: value.clamp(-0.1, 0.1))


def _lost(names: list[str], kind: Callable[[str], Net]) -> list[str]:
    """Idioms and engines whose numbers are not DDP's."""
    lost, before = [], vars(DTensor).get("data")
    for idiom in IDIOMS:
        (expected, _), *others = [_fit(name, 4, kind=partial(kind, idiom)) for name in names]
        moved = kind(idiom).state_dict()
        assert not any(torch.equal(expected[fqn], moved[fqn]) for fqn in expected), "nothing was written"
        for name, (found, _) in zip(names[1:], others, strict=True):
            if not all(torch.equal(found[fqn], expected[fqn]) for fqn in expected):
                lost.append(f"{name}: {idiom}")
    assert vars(DTensor).get("data") is before, "torch's class is given back"
    return lost


@pytest.mark.parametrize("kind", [Student, Clipped])
def test_elementwise_writes_to_shards_between_steps_are_those_of_ddp(kind: Callable[[str], Net]) -> None:
    assert run_distributed(_lost, 2, ["torch_ddp", "fully_shard"], kind) == [[], []]


def test_a_teacher_that_nothing_steps_is_its_own_under_stages_1_and_2() -> None:
    assert run_distributed(_lost, 2, ["torch_ddp", "zero_1", "zero_2"], Student) == [[], []]


class SetsFull(Net):
    def after_step(self) -> None:
        self.head.weight.data = torch.zeros(3, 6)


class Monotone(Net):
    """Weights that its own forward keeps positive, from one of its calls on."""

    def __init__(self, idiom: str, first: int = 1) -> None:
        super().__init__()
        self.idiom, self.first, self.calls = idiom, first, 0
        self.blocks[0].register_forward_pre_hook(self.write)

    def write(self, block: Any, _: Any) -> None:
        self.calls += 1
        assert block[0].weight.data.norm() > 0, "a reading"
        if self.calls >= self.first:
            write(self.idiom, block[0].weight, lambda value: value.clamp(0))


def _refused(name: str, precision: str, kind: Callable[[], Net], steps: int = 3) -> str:
    with pytest.raises(ConfigurationError) as caught:
        _fit(name, steps, kind=kind, precision=precision)
    return str(caught.value)


def _all_refused(name: str, precision: str, kind: Callable[[str], Net]) -> list[str]:
    return [_refused(name, precision, partial(kind, idiom)) for idiom in IDIOMS]


LOST = "Written to by no optimizer (such as by clamp_, or through parameter.data): "


@pytest.mark.parametrize(
    ("name", "precision", "kind", "said"),
    [
        ("zero_1", "32-true", Clipped, "blocks.0.0.weight"),
        ("zero_2", "bf16-mixed", Clipped, "blocks.0.0.weight"),
        ("zero_3", "32-true", Clipped, "blocks.0.0.weight"),
        ("zero_2", "bf16-mixed", Student, "teacher."),  # What was loaded is kept in fp32.
        ("zero_3", "32-true", Student, "teacher."),
        ("fully_shard", "32-true", Monotone, "blocks.0.0.weight"),
        ("zero_3", "32-true", Monotone, "blocks.0.0.weight"),
        ("fully_shard", "bf16-mixed", partial(Student, inside=True), "teacher."),
    ],
)
def test_a_write_to_a_copy_is_refused_on_all_ranks(
    name: str, precision: str, kind: Callable[[str], Net], said: str
) -> None:
    for rank in run_distributed(_all_refused, 2, name, precision, kind):
        for text in rank:
            assert text.startswith(LOST + said)
            assert "full_parameters(trainer, write=True) or set_full_tensor (examples/guides/contract.md" in text


class OnOneRank(Net):
    """Writes what lies in another rank's part."""

    def after_step(self) -> None:
        if torch.distributed.get_rank() == 0:
            self.blocks[1][0].weight.data[0, 0] = 3.0


@pytest.mark.parametrize("name", ["zero_2", "zero_3"])
def test_a_write_of_one_rank_is_refused_on_all(name: str) -> None:
    for said in run_distributed(_refused, 2, name, "32-true", OnOneRank):
        assert said.startswith(f"{LOST}blocks.1.0.weight. ")


def test_a_full_value_is_no_shard() -> None:
    for said in run_distributed(_refused, 2, "fully_shard", "32-true", SetsFull):
        assert "parameter.data is set to a Tensor of (3, 6)" in said


class Looks(Net):
    """Whether its classes are torch's own, and how many hooks its modules have, after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[int] = []

    def after_step(self) -> None:
        assert not {"grad", "data"} & vars(nn.Parameter).keys()
        own = [
            hook
            for module in self.modules()
            for hook in module._forward_hooks.values()
            if isinstance(getattr(getattr(hook, "func", None), "__self__", None), ExternalWriteCheck)
        ]
        self.hooks.append(len(own))


def _looked(name: str) -> list[int]:
    module = Looks()
    _fit(name, 4, kind=lambda: module)
    return module.hooks


@pytest.mark.parametrize(("name", "units"), [("fully_shard", 3), ("zero_3", 3), ("zero_2", 0)])
def test_three_steps_are_looked_at_and_nothing_is_set_on_torch(name: str, units: int) -> None:
    found = run_distributed(_looked, 2, name)[0]
    assert found == [units, units, 0, 0]


def _late(name: str) -> None:
    _fit(name, 5, kind=partial(Monotone, "in place", 4))


@pytest.mark.parametrize("name", ["fully_shard", "zero_3"])
def test_later_writes_cost_nothing_to_find(name: str) -> None:
    run_distributed(_late, 2, name)


def test_engines_that_shard_end_in_any_order() -> None:
    first, second = assignable_data(), assignable_data()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "data" in vars(DTensor)
    second.__exit__(None, None, None)
    assert "data" not in vars(DTensor)


class Wrapper(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def test_only_steps_of_the_modules_parameters_by_other_optimizers_are_refused() -> None:
    module, latent = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), nn.Parameter(torch.ones(2))
    own, wrapped, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in module)
    wrapper = Wrapper(wrapped)
    check = ForeignStepCheck(module, [own, wrapper])
    with check.watch_forward():
        for optimizer in (own, wrapper, wrapped, torch.optim.SGD([latent], lr=0.1)):
            optimizer.step()
        with pytest.raises(ConfigurationError, match=r"^SGD, which .* steps 2\.weight, 2\.bias inside"):
            other.step()
    other.step()  # between steps
    check.remove_hooks()
    with check.watch_forward():
        other.step()
