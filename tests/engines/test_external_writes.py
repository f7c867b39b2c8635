"""Writes to parameters without an optimizer: to shards between steps as under torch's DDP, to copies refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.engines.external_writes import ForeignStepCheck
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


def _lost(names: list[str]) -> list[str]:
    """Idioms and engines whose numbers are not DDP's."""
    lost, before = [], vars(DTensor).get("data")
    for idiom in IDIOMS:
        kind = partial(Student, idiom)
        (expected, _), *others = [_fit(name, 3, kind=kind) for name in names]
        moved = kind().state_dict()
        assert not any(torch.equal(expected[fqn], moved[fqn]) for fqn in expected), "nothing was written"
        for name, (found, _) in zip(names[1:], others, strict=True):
            if not all(torch.equal(found[fqn], expected[fqn]) for fqn in expected):
                lost.append(f"{name}: {idiom}")
    assert vars(DTensor).get("data") is before, "torch's class is given back"
    return lost


def test_elementwise_writes_between_steps_are_those_of_ddp() -> None:
    """To shards, and under stages 1 and 2 to parameters that nothing steps."""
    assert run_distributed(_lost, 2, ["torch_ddp", "fully_shard", "zero_2"]) == [[], []]


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


class OnOneRank(Net):
    """Writes to a part of another rank."""

    def after_step(self) -> None:
        if torch.distributed.get_rank() == 0:
            self.blocks[1][0].weight.data[0, 0] = 3.0


LOST = "Written to by no optimizer (such as by clamp_, or through parameter.data): "
REFUSED: dict[str, list[tuple[str, str, Callable[[], Net]]]] = {
    f"{LOST}blocks.0.0.weight": [
        *(("zero_3", "32-true", partial(Clipped, idiom)) for idiom in IDIOMS),
        ("zero_1", "32-true", partial(Clipped, "data")),
        ("zero_2", "bf16-mixed", partial(Clipped, "in place")),
        *(("fully_shard", "32-true", partial(Monotone, idiom)) for idiom in IDIOMS),
        ("zero_3", "32-true", partial(Monotone, "in place")),
    ],
    f"{LOST}teacher.": [
        ("zero_2", "bf16-mixed", partial(Student, "data")),  # Loaded values are kept in fp32.
        ("zero_3", "32-true", partial(Student, "set")),
        ("fully_shard", "bf16-mixed", partial(Student, "in place", inside=True)),
    ],
    f"{LOST}blocks.1.0.weight. ": [("zero_2", "32-true", OnOneRank), ("zero_3", "32-true", OnOneRank)],
    "parameter.data is set to a Tensor of (3, 6)": [("fully_shard", "32-true", SetsFull)],
}


def _refused() -> list[str]:
    texts = []
    for name, precision, kind in (case for cases in REFUSED.values() for case in cases):
        with pytest.raises(ConfigurationError) as caught:
            _fit(name, 3, kind=kind, precision=precision)
        texts.append(str(caught.value))
    return texts


@pytest.mark.matrix
def test_a_write_to_a_copy_is_refused_on_all_ranks() -> None:
    expected = [(start, case) for start, cases in REFUSED.items() for case in cases]
    for texts in run_distributed(_refused, 2):
        for text, (start, case) in zip(texts, expected, strict=True):
            assert text.startswith(start), case
            assert LOST not in start or "write=True) or set_full_tensor (examples/guides/contract.md" in text


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
