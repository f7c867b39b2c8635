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


class Unusual(Net):
    """Parameters without a dimension, as CLIP's ``logit_scale``, and a module that returns an unusual object."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.boxes = Boxes(plain)

    def forward(self, x: Tensor) -> Tensor:
        boxed = self.boxes(x)
        boxed = boxed if isinstance(boxed, Plain) else boxed["a", 0]
        return super().forward(boxed.x) * self.scale.exp()


class Reader(nn.Module):
    """Reads two tensors several times each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x * torch.tanh(self.one(x)) + self.one(memory) + torch.relu_(self.other(memory)) * memory


class Shared(Net):
    """An encoder and a decoder: all units read one memory, one of them runs twice, and an attention has one input."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(Reader() for _ in range(3))
        self.attention = nn.ModuleList(nn.MultiheadAttention(6, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.sigmoid(self.head.weight.sum() * x)
        for reader in (*self.readers, self.readers[0]):
            x = reader(x, memory)
        for attention in self.attention:
            x = x + attention(x, x, x)[0] + attention(x, memory, memory)[0]
        return super().forward(x)


class Penalty(Net):
    """Its loss has a gradient in it, which goes through the units once more."""

    def forward(self, x: Tensor) -> Tensor:
        output, at = super().forward(x), x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(at).sum(), at, create_graph=True)
        return output + slope.square().sum()


class PenaltyFirst(Net):
    """The same, and then another pass through the units."""

    def forward(self, x: Tensor) -> Tensor:
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(at).sum(), at, create_graph=True)
        return super().forward(x) + slope.square().sum()


class Listed(nn.Module):
    """Computes with its parameters through what it keeps of them beside their names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.weights = [self.one, (self.other, "other")]
        self._by_name: dict[str, Any] = {"shift": self.shift, "scale": self.scale}
        self._by_name["itself"] = self._by_name

    def forward(self, x: Tensor) -> Tensor:
        first, (second, _) = self.weights
        x = torch.tanh(nn.functional.linear(x, first, self._by_name["shift"]))
        return nn.functional.linear(x, second) * self._by_name["scale"]


class Lists(Net):
    """Such a module is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listed() for _ in range(2))


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


def _fits(names: list[str], steps: int, kind: type[Net]) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    return [_fit(name, steps, kind=kind) for name in names]


@pytest.mark.parametrize("kind", sampled([Net, Unusual, Shared, Penalty, Lists], 1, 3))
def test_one_loop_drives_every_engine_to_the_same_bits(kind: type[Net]) -> None:
    names = list(ENGINES)
    by_rank = run_distributed(_fits, 2, names, 3, kind)
    expected = by_rank[0][0][0]
    started = kind().state_dict()
    assert any(not torch.equal(expected[fqn], started[fqn]) for fqn in expected), "nothing was stepped"
    assert not torch.equal(by_rank[0][0][1][0], by_rank[1][0][1][0]), "the ranks saw the same batches"
    for found in by_rank:
        for name, (masters, _) in zip(names, found, strict=True):
            wrong = [fqn for fqn in expected if not torch.equal(masters[fqn], expected[fqn])]
            assert not wrong, f"{name}: {wrong}"


class Unused(Net):
    """One of its parameters is in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2, bias=False)


def _refused(name: str, kind: Callable[[], Net]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        _fit(name, 2, kind=kind)
    return str(caught.value)


def test_ddp_names_parameters_without_a_gradient_and_the_option() -> None:
    for said in run_distributed(_refused, 2, "torch_ddp", Unused):
        assert "does not depend on extra.weight" in said
        assert "Set find_unused_parameters: true" in said


def test_stage_3_refuses_outputs_that_hide_tensors_of_own_parameters() -> None:
    for said in run_distributed(_refused, 2, "zero_3", partial(Unusual, plain=True)):
        assert "Boxes has parameters of its own and returns a Plain" in said


@pytest.mark.parametrize(("name", "kind"), [("fully_shard", Decayed), ("zero_3", Decayed), ("zero_3", PenaltyFirst)])
def test_a_step_that_reads_parameters_which_are_not_gathered_is_told(name: str, kind: type[Net]) -> None:
    for said in run_distributed(_refused, 2, name, kind):
        assert "The step uses parameters that Shard" in said


def _faulty(steps: int) -> bool:
    fine, _ = _fit("fully_shard", steps)
    other, _ = _fit("fully_shard", steps, lr=0.1000001)
    return all(torch.equal(fine[fqn], other[fqn]) for fqn in fine)


def test_the_comparison_sees_another_learning_rate() -> None:
    assert not any(run_distributed(_faulty, 2, 3))


@pytest.mark.parametrize("name", [*ENGINES])
def test_what_was_never_prepared_can_be_closed(name: str) -> None:
    ENGINES[name]().release_module(failed=True)
