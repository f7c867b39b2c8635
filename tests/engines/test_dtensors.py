"""What is written to parts of a sharded tensor, and what is asked of it, is as of the full one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from lightning_shard.engines import _dtensors
from lightning_shard.engines._dtensors import InFull
from lightning_shard.tensors.full import full_of
from tests import stand_in
from tests.harness import run_distributed

ROWS, COLUMNS = 11, 8  # Rows that ranks do not divide.
PLAIN = torch.linspace(-1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)
INDEX, MASK = torch.tensor([0, ROWS - 2]), torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 3 > 0
STEP = "[Strategy]ShardFSDPStrategy.training_step"
HOOK = "[LightningModule]Net.on_before_optimizer_step"
OWN = "[LightningModule]Net.optimizer_step"


def _stale(p: Tensor) -> None:
    first = p[0]
    p.mul_(2)  # A view sees it.
    first.add_(1)
    p.add_(first.sum())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda p: p[0].zero_(),
    "last row": lambda p: p[-1].mul_(0.5),
    "rows": lambda p: p[2:9].mul_(0.5),
    "every second row": lambda p: p[::2].add_(1),
    "all rows": lambda p: p[:].mul_(0.5),
    "column": lambda p: p[:, 0].mul_(0.5),
    "element": lambda p: p[3, 2].fill_(1.0),
    "set row": lambda p: p.__setitem__(0, 0.0),
    "set rows": lambda p: p.__setitem__(slice(0, 3), torch.ones(3, COLUMNS)),
    "set element": lambda p: p.__setitem__((3, 2), 1.0),
    "set column": lambda p: p.__setitem__((slice(None), 0), 0.0),
    "set all": lambda p: p.__setitem__(..., 0.5),
    "set list": lambda p: p.__setitem__([0, ROWS - 1], 0.0),
    "set mask": lambda p: p.__setitem__(p > 0, 0.0),
    "set of data": lambda p: p.data.__setitem__(0, 0.0),
    "select": lambda p: p.select(0, 1).fill_(0.3),
    "narrow": lambda p: p.narrow(0, 1, 4).mul_(2),
    "part of a part": lambda p: p[1:7][2][3:5].zero_(),
    "chunk": lambda p: p.chunk(2)[0].mul_(0.5),
    "split": lambda p: p.split(3)[1].mul_(0.5),
    "split sizes": lambda p: p.split([4, ROWS - 4])[1].mul_(0.5),
    "unbind": lambda p: p.unbind(0)[2].mul_(0.5),
    "iterate": lambda p: [row.mul_(0.5) for row in p],
    "diagonal": lambda p: p.diagonal().zero_(),
    "flat": lambda p: p.view(-1)[3:5].zero_(),
    "flatten": lambda p: p.flatten().mul_(0.5),
    "transposed row": lambda p: p.T[0].mul_(0.5),
    "foreach of rows": lambda p: torch._foreach_mul_([p[0], p[5]], 0.5),
    "out": lambda p: torch.mul(p[1], 2, out=p[0]),
    "clip of a row": lambda p: p[0].clamp_(-0.1, 0.1),
    "stale view": _stale,
    "index fill": lambda p: p.index_fill_(0, INDEX, 0.0),
    "index copy": lambda p: p.index_copy_(0, INDEX, torch.zeros(2, COLUMNS)),
    "index add": lambda p: p.index_add_(0, INDEX, torch.ones(2, COLUMNS)),
    "scatter": lambda p: p.scatter_(1, torch.zeros(ROWS, 1, dtype=torch.long), 0.0),
    "masked fill": lambda p: p.masked_fill_(MASK, 0.0),
    "triangle": lambda p: p.triu_(),
    "renorm": lambda p: p.renorm_(2, 0, 0.5),
    "copy": lambda p: p.copy_(torch.ones(ROWS, COLUMNS)),
    "mask": lambda p: p.mul_(MASK),
    "a row of plain numbers": lambda p: p.mul_(torch.linspace(0, 1, COLUMNS)),
    "lerp": lambda p: p.lerp_(torch.ones(ROWS, COLUMNS), 0.1),
    "read element": lambda p: p.mul_(float(p[3, 2])),
    "read rows": lambda p: p.mul_(p[:4].sum()),
    "reversed rows": lambda p: p.copy_(p[torch.arange(ROWS - 1, -1, -1)]),
    "chosen": lambda p: p.mul_(float(p[p > 0].min())),
    "unique": lambda p: p.mul_(len(p.unique())),
    "nonzero": lambda p: p.mul_(len(p.nonzero())),
    "quantile": lambda p: p.clamp_(max=float(p.quantile(0.5))),
    "kth": lambda p: p.mul_(float(p.flatten().kthvalue(5)[0])),
    "close": lambda p: p.mul_(2.0 if torch.allclose(p, p) else 0.0),
    "diagonal filled": lambda p: p.fill_diagonal_(1.0),
    "foreach with plain": lambda p: torch._foreach_add_([p], [PLAIN]),
    "foreach copy": lambda p: torch._foreach_copy_([p], [PLAIN]),
    "foreach addcmul": lambda p: torch._foreach_addcmul_([p], [PLAIN], [PLAIN], 0.1),
    "outer product": lambda p: p.addr_(PLAIN[:, 0], PLAIN[0]),
    "matrix product": lambda p: p.addmm_(PLAIN @ PLAIN.T, PLAIN),
    "power": lambda p: p.abs_().pow_(PLAIN.abs()),
    "put": lambda p: p.put_(INDEX, torch.ones(2)),
    "masked scatter": lambda p: p.masked_scatter_(MASK, PLAIN),
    "index reduce": lambda p: p.index_reduce_(0, INDEX, torch.ones(2, COLUMNS), "mean"),
    "scatter reduce": lambda p: p.scatter_reduce_(0, torch.zeros(1, COLUMNS, dtype=torch.long), PLAIN[:1], "amax"),
    "product": lambda p: p.mul_((p @ PLAIN.T).sum()),
    "einsum": lambda p: p.mul_(torch.einsum("ij,kj->ik", p, PLAIN).mean()),
    "layer": lambda p: p.mul_(functional.linear(PLAIN[:3], p).max()),
    "embedding": lambda p: p.add_(functional.embedding(INDEX, p).sum(0)),
    "distance": lambda p: p.mul_(functional.mse_loss(p, PLAIN)),
    "joined": lambda p: p.mul_(torch.cat([p, PLAIN]).std()),
    "square by square": lambda p: p[:COLUMNS].copy_(p[:COLUMNS] @ torch.ones(COLUMNS, COLUMNS)),
    "histogram": lambda p: p.mul_(torch.histogram(p.float().cpu(), 5).hist[2]),
    "unfolded": lambda p: p.mul_(p.unfold(0, 3, 1).sum()),
    "copied from": lambda p: p.add_(torch.zeros(ROWS, COLUMNS).copy_(p)),
    # torch reduces or gathers for these; sums of integers are exact in any order.
    "centred": lambda p: p.sub_(p.mul(8).round().mean(0)),
    "by its sum": lambda p: p.div_(p.mul(8).round().abs().sum()),
    "clipped by its sum": lambda p: p.mul_((1 / p.mul(8).round().abs().sum()).clamp(max=1)),
    "compared": lambda p: p.mul_(2) if (p > 0).sum() > 3 else None,
    "sorted": lambda p: p.copy_(p.sort(0).values),
    "softmax": lambda p: p.copy_(p.softmax(0)),
    "gram": lambda p: p.mul_((p.mul(8).round().t() @ p.mul(8).round()).trace()),
    "sums changed in place": lambda p: p.mul_(p.mul(8).round().abs().sum(0).add_(1).sqrt_()),
    "added to a number": lambda p: p.mul_(torch.zeros(()).add_(p.mul(8).round().sum())),
    **{
        loss.__name__: lambda p, loss=loss: p.mul_(loss(p.clamp(0, 1), p.gt(0).float()))
        for loss in (
            *(functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.soft_margin_loss),
            *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
        )
    },
    "printed": lambda p: p.mul_(float(f"{p.mul(8).round().sum():.1f}") + float(f"{p[3, 2]:.3f}")),
    "numbers in a list": lambda p: p.mul_(torch.tensor([p.mul(8).round().sum(), p[3, 2]]).sum()),
    "flags and positions in lists": lambda p: p.mul_(torch.tensor([[(p > 2).any(), True], [p.argmax(), 2]]).sum()),
    "listed": lambda p: p[0].mul_(sum(p[1].tolist()) + bool(repr(p[2])) + float(p[3].numpy()[0])),
}
ONE_ROW: dict[str, Callable[[Tensor], Any]] = {  # which one rank has
    "largest": lambda p: p.mul_(p.norm(math.inf)),
    "largest of a list": lambda p: p.mul_(torch.nn.utils.get_total_norm([p, p], math.inf)),
    "largest of shards and others": lambda p: p.mul_(torch.nn.utils.get_total_norm([p, torch.ones(2) * 9], math.inf)),
    "largest of each": lambda p: p.mul_(torch._foreach_max([p])[0]),
    "squeezed": lambda p: p.squeeze().mul_(2),
    "centred": lambda p: p.sub_(p.mean(0, keepdim=True)),
}


DEVICE = stand_in.NAME if stand_in.chosen() else "cpu"


def _cut(full: Tensor, mesh: DeviceMesh) -> DTensor:
    """Shards on the host, as FSDP keeps those that are offloaded from the mesh's device, within a unit's storage."""
    on_device = distribute_tensor(full.to(mesh.device_type), mesh, [Shard(0)])
    own = on_device.to_local().cpu()
    return DTensor(torch.cat([torch.zeros(7), own.flatten()])[7:].view(own.shape), on_device._spec, requires_grad=False)


@torch.no_grad()
def _different(*, as_full: bool, rows: int = ROWS) -> list[str]:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    found = []
    undo = InFull.answer()
    InFull.begins(HOOK)
    # Engines of other tests may be open.
    with nullcontext() if as_full else InFull.parts_as_torch_does():
        for name, write in (ONE_ROW if rows == 1 else WRITES).items():
            expected = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
            sharded = _cut(expected, mesh)
            expected = expected.clone()
            write(expected)
            try:
                write(sharded)
            except (RuntimeError, AssertionError, TypeError):
                assert not as_full, name
            if not torch.equal(full_of(sharded).cpu(), expected):
                found.append(name)
    InFull.ends(HOOK)
    undo()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_parts_of_shards_are_parts_of_the_full_tensor(ranks: int) -> None:
    for rows in (ROWS, 1):
        assert run_distributed(_different, ranks, as_full=True, rows=rows) == [[]] * ranks


def test_torch_alone_loses_them() -> None:
    for lost in run_distributed(_different, 2, as_full=False):
        assert {"row", "rows", "element", "set element", "narrow", "chunk", "diagonal", "iterate"} <= {*lost}


def _meets_plain(action: str) -> list[str]:
    sharded = _cut(torch.ones(4, 4), init_device_mesh(DEVICE, (dist.get_world_size(),)))
    own = torch.full((4, 4), 1.0 + dist.get_rank())  # A rank's own, as activations are, of the parameter's shape.
    found = []
    undo = InFull.answer()
    InFull.begins(action)
    for act in (
        lambda: sharded.mul_(torch.ones(4)).to_local().sum(),
        lambda: torch._foreach_mul_([sharded], [torch.ones(4, 4)])[0].to_local().sum(),
        lambda: (sharded * torch.ones(4, 4)).full_tensor().sum(),
        lambda: torch.ones(4, 4).copy_(sharded).sum(),
        lambda: functional.linear(own, sharded).sum(),
        lambda: (own[None].repeat(2, 1, 1) * sharded).sum(),
        lambda: torch.tensor(sharded.sum().numpy()),
        lambda: torch.tensor(sharded.detach().cpu().numpy()),
    ):
        try:
            found.append(str(float(act())))
        except (RuntimeError, TypeError) as error:
            found.append(str(error))
    InFull.ends(action)
    undo()
    return found


def test_plain_tensors_are_taken_in_hooks_alone_and_what_a_rank_makes_of_its_own_stays_its_own() -> None:
    for action in (STEP, HOOK, OWN, "optimizer_step"):
        for rank, found in enumerate(run_distributed(_meets_plain, 2, action)):
            *taken, total, values = found
            own = 64.0 * (1 + rank)
            expected = ["8.0", "8.0", "16.0", "16.0", str(own), str(own / 2)]
            some = {HOOK: len(taken), OWN: len(taken), STEP: 2}.get(action, 0)  # In a step what is written in place.
            assert taken[:some] == expected[:some]
            assert all("mixed torch.Tensor and DTensor" in said for said in taken[some:])
            assert "shape ():" in total
            assert "shape (4, 4)" in values
            assert "on all ranks" in values


def _norm_in_a_step() -> float:
    gradients = [
        _cut(torch.full((rows, 4), 0.5), init_device_mesh(DEVICE, (dist.get_world_size(),))) for rows in (4, 9)
    ]
    undo = InFull.answer()
    InFull.begins(STEP)
    # Sums of halves are exact in any order.
    norm = float(torch.nn.utils.get_total_norm(gradients, norm_type=1.0).clamp(max=100.0))
    InFull.ends(STEP)
    undo()
    return norm


def test_the_norm_of_gradients_is_taken_in_manual_steps() -> None:
    """On a stand-in for a GPU its groups have no backend for the host, where these lie."""
    assert run_distributed(_norm_in_a_step, 2) == [26.0, 26.0]


def _most_at_a_time() -> dict[str, int]:
    """How many full tensors of a list are there at one moment."""
    there, most = set[int](), 0

    def counted(shard: DTensor) -> Tensor:
        nonlocal most
        full = full_of(shard)
        there.add(id(full))
        weakref.finalize(full, there.discard, id(full))
        most = max(most, len(there))
        return full

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    shards = [_cut(torch.full((rows, 4), 0.5), mesh) for rows in (1, 4, 9)]
    found = {}
    undo = InFull.answer()
    InFull.begins(HOOK)
    with patch.object(_dtensors, "full_of", counted):
        for name, act in {
            "largest norm": lambda: torch.nn.utils.get_total_norm(shards, math.inf),
            "with plain ones": lambda: torch.nn.utils.get_total_norm([*shards, torch.ones(3)], math.inf),
            "largest": lambda: torch._foreach_max(shards),
            "written from plain ones": lambda: torch._foreach_copy_(
                [torch.empty(shard.shape) for shard in shards], shards
            ),
        }.items():
            most = 0
            act()
            found[name] = most
    InFull.ends(HOOK)
    undo()
    return found


def test_one_tensor_of_a_list_is_full_at_a_time() -> None:
    for found in run_distributed(_most_at_a_time, 2):
        assert found == dict.fromkeys(found, 1)


def _within(*actions: tuple[str, str]) -> str:
    undo = InFull.answer()
    for method, action in actions:
        getattr(InFull, method)(action)
    mixed = _meets_plain("none")[0]
    InFull.ends(STEP)
    undo()
    return mixed


def test_an_action_that_lightning_does_not_end_is_forgotten() -> None:
    begins = ("begins", HOOK), ("begins", STEP), ("begins", "optimizer_step")
    assert "mixed" in run_distributed(_within, 1, *begins)[0]
    assert run_distributed(_within, 1, *begins, ("ends", STEP))[0] == "16.0"
