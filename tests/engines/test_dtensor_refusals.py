"""Operators that a sharded tensor would answer wrongly or lose raise on the rank that asks, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from lightning_shard.engines import dtensor_refusals
from lightning_shard.errors import ConfigurationError
from tests import stand_in
from tests.groups import sampled
from tests.harness import run_distributed

DEVICE = stand_in.NAME if stand_in.chosen() else "cpu"
ROWS, COLUMNS = 11, 8  # Rows that ranks do not divide.

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda p: float(p.norm()),
    "condition": lambda p: bool(p.isnan().any()),
    "element": lambda p: p[0, 0].item(),
    "row": lambda p: p[0].zero_(),
    "set element": lambda p: p.__setitem__((3, 2), 1.0),
    "iterate": lambda p: [row.mul_(0.5) for row in p],
    "diagonal": lambda p: p.diagonal().zero_(),
    "triangle": lambda p: p.triu_(),
    "normal": lambda p: p.normal_(),
    "truncated": nn.init.trunc_normal_,
    "dropout": functional.dropout,
    "uneven mean": lambda p: p.mean(),
    "sorted": lambda p: p.sort(0),
    "softmax": lambda p: p.softmax(0),
}
TAKEN: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda p: p.mul_(2).add_(p).clamp_(-1, 1),
    "data": lambda p: p.data.lerp_(p * 2, 0.1),
    "all rows": lambda p: p[:].mul_(2),
    "column": lambda p: p[:, 0].zero_(),
    "largest of rows": lambda p: p.mul_(p.amax(1, keepdim=True)),
    "foreach": lambda p: torch._foreach_lerp_([p], [p * 2], 0.5),
    "masked": lambda p: p.masked_fill_(p > 0, 0.5),
    "by its norm": lambda p: p.div_(p.mul(8).round().abs().sum()),
}


def _cut(mesh: Any) -> tuple[Tensor, DTensor]:
    full = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return full, distribute_tensor(full.clone(), mesh, [Shard(0)])


@torch.no_grad()
def _asked() -> dict[str, str]:
    """What rank 0 alone is told, while the others wait for nothing."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    sharded = [_cut(mesh)[1] for _ in REFUSED]
    undo, said = dtensor_refusals.install_refusals(), {}
    for (name, ask), tensor in zip(REFUSED.items(), sharded, strict=True):
        if dist.get_rank() == 0:
            try:
                said[name] = f"gave {ask(tensor)}"
            except ConfigurationError as error:
                said[name] = str(error)
    undo()
    return said


@pytest.mark.parametrize("ranks", sampled([2, 3], 0))
def test_one_rank_that_asks_is_refused_at_once(ranks: int) -> None:
    said, *_ = run_distributed(_asked, ranks)
    assert said.keys() == REFUSED.keys()
    assert [n for n, text in said.items() if "call tensor.full_tensor() on all ranks" not in text] == []
    assert all("examples/guides/contract.md" in text for text in said.values())


@torch.no_grad()
def _different(names: list[str]) -> list[str]:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    cases = {name: {**TAKEN, **REFUSED}[name] for name in names}
    undo, found = dtensor_refusals.install_refusals(), []
    for name, act in cases.items():
        full, sharded = _cut(mesh)
        for each in (full, sharded):
            torch.manual_seed(1)
            act(each)
        if not torch.equal(sharded.full_tensor(), full):
            found.append(name)
    undo()
    return found


def test_what_each_rank_does_to_its_own_part_is_right() -> None:
    assert run_distributed(_different, 2, [*TAKEN]) == [[], []]


def test_nothing_is_left_of_the_table() -> None:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    undo, again = dtensor_refusals.install_refusals(), dtensor_refusals.install_refusals()
    assert handlers != before
    again()
    assert handlers != before
    undo()
    assert handlers == before
