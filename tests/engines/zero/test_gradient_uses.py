"""Gradients under ZeRO are no attribute of parameters: drops are followed, changes refused, what only reads is told."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.engines.zero.gradients import GradientUses
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.flat import FlatGroup, FlatMember


def halves(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def divides(parameter: Tensor) -> None:
    for each in (parameter,):
        if each.grad is not None:
            each.grad /= 2


def assigns(parameter: Tensor) -> None:
    parameter.grad = torch.zeros_like(parameter)


def clips(parameter: Tensor) -> None:
    nn.utils.clip_grad_norm_([parameter], 1.0)


def sets_none(parameter: Tensor) -> None:
    parameter.grad = None


def deletes(parameter: Tensor) -> None:
    del parameter.grad


def zeroes(parameter: Tensor) -> None:
    nn.ParameterList([parameter]).zero_grad()


def measures(parameter: Tensor) -> Any:
    return parameter.grad is not None and parameter.grad.norm() == 0


def counts(parameter: Tensor) -> int:
    return sum(each.grad is not None for each in (parameter,))


@pytest.fixture
def watched() -> Iterator[tuple[nn.Parameter, list[str]]]:
    """A parameter whose gradients are looked at, and the names of those that were dropped."""
    dropped: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    with GradientUses("zero(stage=1)", {parameter: "net.weight"}, [], dropped.append).watched():
        yield parameter, dropped
    assert "grad" not in vars(nn.Parameter)


Watched = tuple[nn.Parameter, list[str]]


@pytest.mark.parametrize("change", [halves, divides, assigns, clips])
def test_a_change_is_refused(watched: Watched, change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"test_gradient_uses.py:\d+ uses .grad of net.weight"):
        change(watched[0])


def test_what_has_no_source_is_taken_for_a_change(watched: Watched) -> None:
    with pytest.raises(ConfigurationError, match=r"<string>:1 uses .grad of net.weight"):
        eval("parameter.grad", {"parameter": watched[0]})


@pytest.mark.parametrize("drop", [sets_none, deletes, zeroes])
def test_a_drop_is_followed(watched: Watched, drop: Callable[[Tensor], Any]) -> None:
    drop(watched[0])
    assert watched[1] == ["net.weight"]


@pytest.mark.parametrize("read", [measures, counts])
def test_what_only_reads_is_told_once(watched: Watched, read: Callable[[Tensor], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not read(watched[0])
    assert len(caught) == 1
    assert "uses .grad of net.weight, but under zero(stage=1) it is None" in str(caught[0].message)


def test_other_tensors_have_gradients(watched: Watched) -> None:
    other = nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.sum().backward()
        halves(other)
    assert torch.equal(other.grad, torch.full((2,), 0.5))  # type: ignore[arg-type]
    other.grad = None
    assert other.grad is None
    assert watched[1] == []


def test_masters_have_no_gradients_for_users_and_count_their_writes() -> None:
    flat = torch.ones(2)
    flat.grad = torch.ones(2)  # as where it lies on the host
    member = FlatMember(fqn="net.weight", shape=torch.Size([2]), start=0, length=2, offset=0)
    group = FlatGroup(flat=flat, members=(member,), group={})
    dropped: list[str] = []
    uses = GradientUses("zero(stage=1)", {}, [group], dropped.append)
    memory = flat.data_ptr()
    with uses.watched():
        for change in (halves, divides, assigns, clips):
            with pytest.raises(ConfigurationError, match=r"uses \.grad of net\.weight"):
                change(flat)
        with pytest.warns(UserWarning, match=r"uses \.grad of net\.weight, but under zero"):
            assert measures(flat) is False
        zeroes(flat)
        versions = [flat._version]
        flat.data.mul_(3)
        versions.append(flat._version)
        flat.data = flat.data * 2
        versions.append(flat._version)
        assert versions == sorted(set(versions))
        with uses.stepping():
            halves(flat)
        assert dropped == ["net.weight"]
    assert type(flat) is Tensor
    assert flat.data_ptr() == memory
    assert torch.equal(flat, torch.full((2,), 6.0))
    assert torch.equal(flat.grad, torch.full((2,), 0.5))


def test_a_look_at_a_gradient_keeps_nothing_of_its_callers(watched: tuple[nn.Parameter, list[str]]) -> None:
    parameter, _ = watched

    def reads() -> weakref.ref[Any]:
        large = nn.Linear(1, 1)
        parameter.grad = None
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        # DeepSpeed's buckets would live into the step, as long as no garbage is collected.
        assert reads()() is None
    finally:
        gc.enable()


def test_engines_end_in_any_order() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    dropped: list[str] = []
    stacks = ExitStack(), ExitStack()
    for name, parameter, stack in (("first", first, stacks[0]), ("second", second, stacks[1])):
        stack.enter_context(GradientUses("a strategy", {parameter: name}, [], dropped.append).watched())
    stacks[0].close()
    second.grad = None
    first.grad = torch.ones(2)  # nobody's any more
    stacks[1].close()
    assert dropped == ["second"]
    assert "grad" not in vars(nn.Parameter)
    assert torch.equal(first.grad, torch.ones(2))
