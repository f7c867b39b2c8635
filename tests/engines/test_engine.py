"""Every engine through the `Engine` protocol alone, without Lightning: one loop drives all, and their numbers agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.engines.engine import Engine, PlannedRun, Run
from lightning_shard.engines.fully_shard import FSDPOptions, FullyShard
from lightning_shard.engines.replicate import Replicate
from lightning_shard.engines.torch_ddp import DDPOptions, TorchDDP
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.engines.zero.config.zero_settings import read_settings
from lightning_shard.engines.zero.connection import connect_deepspeed
from lightning_shard.engines.zero.zero_engine import ZeroEngine
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig, build_mesh
from lightning_shard.precision.policy import policy_from
from lightning_shard.tensors.full import gather_full
from lightning_shard.tensors.names import fqns
from tests.groups import sampled
from tests.harness import run_distributed

CPU = torch.device("cpu")
SHARDED, REPLICATED = MeshConfig(), MeshConfig(replicate="auto", shard=1)


def _zero(stage: int) -> Callable[[], Engine]:
    settings = read_settings(DeepSpeedFields(stage=stage), aligned=False, problems=[])  # type: ignore[arg-type]
    return lambda: ZeroEngine(settings, ForwardOptions(), mesh=SHARDED)


ENGINES: dict[str, Callable[[], Engine]] = {
    "torch_ddp": lambda: TorchDDP(DDPOptions(), ForwardOptions(), at_boundary=True),
    "replicate": lambda: Replicate(DDPOptions(), ForwardOptions(), at_boundary=True),
    "fully_shard": lambda: FullyShard(FSDPOptions(mesh=SHARDED), ForwardOptions(), at_boundary=False),
    **{f"zero_{stage}": _zero(stage) for stage in (1, 2, 3)},
}


class Net(nn.Module):
    """Two units and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def after_step(self) -> None:
        """What a callback would do."""


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxes(nn.Module):
    """Its output has no ``__dict__``, or with ``plain`` is an object in which nobody looks for tensors."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 6), 0.4))
        self.plain = plain

    def forward(self, x: Tensor) -> Any:
        return Plain(x @ self.weight) if self.plain else {("a", 0): Slotted(x @ self.weight)}


class Penalty(Net):
    """Its loss has a gradient in it, which goes through the units once more."""

    def forward(self, x: Tensor) -> Tensor:
        output, at = super().forward(x), x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(at).sum(), at, create_graph=True)
        return output + slope.square().sum()


class Unusual(Penalty):
    """Also parameters without a dimension, as CLIP's ``logit_scale``, and a module that returns an unusual object."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.boxes = Boxes(plain)

    def forward(self, x: Tensor) -> Tensor:
        boxed = self.boxes(x)
        boxed = boxed if isinstance(boxed, Plain) else boxed["a", 0]
        return super().forward(boxed.x) * self.scale.exp()


class Decayed(Net):
    """It reads the parameters of its units by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


def _fit(
    name: str, steps: int, lr: float = 0.1, kind: Callable[[], Net] = Net, precision: str = "32-true"
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Masters at the end, and this rank's losses."""
    ranks = dist.get_world_size()
    engine = ENGINES[name]()
    planned = PlannedRun(
        ranks=ranks, per_node=ranks, policy=policy_from(precision, aligned=True), aligned=True, device_type="cpu"
    )
    engine.check(planned)
    connection = (
        connect_deepspeed(
            CPU, backend="gloo", local_rank=dist.get_rank(), local_size=ranks, timeout=timedelta(minutes=1)
        )
        if name.startswith("zero")
        else None
    )
    module = kind()
    facts = engine.memory_model(module, planned)
    mesh = build_mesh((ranks // facts.shards, facts.shards), device_type="cpu")
    engine.prepare(module, Run(planned=planned, device=CPU, mesh=mesh, seed=1, fitting=True))
    (optimizer,), _ = engine.attach_optimizers([torch.optim.AdamW(module.parameters(), lr=lr)])
    losses = []
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for _ in range(steps):
        batch = torch.randn(4, 6, generator=generator)
        loss = engine.forward(lambda x: module(x).square().mean(), batch)
        engine.backward(loss, lambda value: value.backward(), overridden=False)
        engine.finish_gradients()
        engine.step_optimizer(optimizer, skip=False)
        optimizer.zero_grad()
        module.after_step()
        losses.append(loss.detach())
    engine.reshard_and_sync_masters()
    assert engine.memory_model(module, planned) == facts, "what was planned is another engine than the one that ran"
    masters, own = engine.masters(), fqns(module).tensors
    found = {fqn: gather_full(masters.get(fqn, tensor), device=CPU) for fqn, tensor in own.items()}
    engine.release_module(failed=False)
    if connection is not None:
        connection.disconnect()
    return found, losses


def _fits(steps: int, kind: type[Net]) -> dict[str, tuple[dict[str, Tensor], list[Tensor]]]:
    return {name: _fit(name, steps, kind=kind) for name in ENGINES}


@pytest.mark.parametrize("kind", sampled([Unusual], 0))
def test_one_loop_drives_every_engine_to_the_same_bits(kind: type[Net]) -> None:
    by_rank = run_distributed(_fits, 2, 3, kind)
    expected = by_rank[0]["torch_ddp"][0]
    initial = kind().state_dict()
    assert any(not torch.equal(expected[fqn], initial[fqn]) for fqn in expected), "nothing was stepped"
    first, second = (found["torch_ddp"][1][0] for found in by_rank)
    assert not torch.equal(first, second), "the ranks saw the same batches"
    for found in by_rank:
        for name, (masters, _) in found.items():
            wrong = [fqn for fqn in expected if not torch.equal(masters[fqn], expected[fqn])]
            assert not wrong, f"{name}: {wrong}"


REFUSED: list[tuple[str, Callable[[], Net], str]] = [
    ("zero_3", partial(Unusual, plain=True), "Boxes has parameters of its own and returns a Plain"),
    ("fully_shard", Decayed, "The step uses parameters that Shard"),
    ("zero_3", Decayed, "The step uses parameters that Shard"),
]


def _checked() -> None:
    for name, kind, text in REFUSED:
        with pytest.raises(ConfigurationError, match=text):
            _fit(name, 2, kind=kind)
    fine, other = (_fit("fully_shard", 3, lr=lr)[0] for lr in (0.1, 0.1000001))
    assert not all(torch.equal(fine[fqn], other[fqn]) for fqn in fine), "the comparison sees another learning rate"
    for name in ENGINES:
        ENGINES[name]().release_module(failed=True)  # An engine that was never prepared can be closed.


def test_steps_that_can_not_be_right_are_refused() -> None:
    run_distributed(_checked, 2)
