"""Gradients by a module's inputs inside of forward, as forces of an energy, against stock Lightning's ``ddp``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.groups import sampled
from tests.harness import run_distributed
from tests.strategies.test_against_stock import NAMES, WIDTH, Plain, differences


@dataclass(frozen=True)
class Atoms:
    pos: Tensor
    x: Tensor


class Mixing(nn.Module):
    """Hands a container on, in which the positions are as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, data: Any = None, *, named: Any = None) -> Any:
        data = named if data is None else data
        if isinstance(data, dict):
            data["x"] = data["x"] + self.linear(data["x"]).tanh()
            return data
        if isinstance(data, tuple):
            return (data[0], data[1] + self.linear(data[1]).tanh())
        return replace(data, x=data.x + self.linear(data.x).tanh())


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Mixing() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, kind: str, pos: Tensor) -> tuple[Tensor, Tensor]:
        data: Any = {"dict": {"pos": pos, "x": pos * 1.0}, "tuple": (pos, pos * 1.0), "class": Atoms(pos, pos * 1.0)}
        data = data["dict" if kind == "named" else kind]
        for block in self.blocks:
            data = block(named=data) if kind == "named" else block(data)
        pos, x = (data.pos, data.x) if kind == "class" else data if kind == "tuple" else (data["pos"], data["x"])
        return pos, self.last(x)


class Forces(nn.Module):
    """The gradient of the energy by the positions that the modules hand on, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, kind: str, pos: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        pos, energy = self.energy(kind, pos.clone().requires_grad_())
        return energy, torch.autograd.grad(energy.sum(), pos, create_graph=training)[0]


class Potential(Plain):
    """Learns energies and forces, of two systems in a step, and has forces in validation too."""

    kind = "dict"

    def __init__(self) -> None:
        super().__init__()
        self.net = Forces()

    def loss(self, pos: Tensor, training: bool) -> Tensor:
        energy, forces = self.net(self.kind, pos, training)
        return forces.square().mean() + (energy - 1).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, 0) + self.loss(batch[0], True) + self.loss(batch[0].roll(1, 0), True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.weights[f"validated {self.global_step}"] = self.loss(batch[0].clone(), False).detach()


class InTuples(Potential):
    kind = "tuple"


class InClasses(Potential):
    kind = "class"


class ByName(Potential):
    kind = "named"


class BeforeOthers(Potential):
    """Other forward passes follow, of which one gathers the blocks and frees them again."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = Plain.training_step(self, batch, 0) + self.loss(batch[0], True)
        with torch.no_grad():
            self.net.energy("dict", batch[0])
        return loss


class Spare(Potential):
    """Has units that never run, whose weights would decay with gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList(Mixing() for _ in range(2))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


BF16 = {"precision": "bf16-mixed"}
CASES = [(Potential, {}), (InTuples, {}), (InClasses, {}), (ByName, {}), (BeforeOthers, {}), (Potential, BF16)]


@pytest.mark.parametrize(("kind", "given"), sampled(CASES, 0))
def test_forces_are_those_of_stock_ddp(kind: type[Plain], given: dict[str, Any]) -> None:
    names = [*NAMES, "shard_fsdp_grad_op_aligned"]
    # Stock's has autocast in bf16. What modules get are cast copies of their inputs there, the same on every engine.
    names, reference = ([n for n in names if n.endswith("aligned")], "shard_ddp_aligned") if given else (names, "ddp")
    for found in run_distributed(differences, 2, kind, names, given, reference):
        assert found == {name: [] for name in names}


def test_units_that_never_run_are_not_stepped() -> None:
    for found in run_distributed(differences, 2, Spare, ["shard_fsdp"], {}, "ddp_find_unused_parameters_true"):
        assert found == {"shard_fsdp": []}
