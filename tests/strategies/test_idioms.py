"""What modules do to themselves: with two names, frozen for a while, in fp64, stepped in forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard.errors import ConfigurationError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.strategies.test_against_stock import NAMES, WIDTH, Plain, differences, weights


class HeldTwice(Plain):
    """A loss holds the model, which so has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.loss = nn.Module()
        self.loss.model = self.net

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.net(x) + self.loss.model(x + 1))  # type: ignore[operator]


class Adapted(Plain):
    """A reference pass with adapters switched off, as of PEFT for DPO, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.adapter, self.switched_on = nn.Linear(WIDTH, WIDTH, bias=False), True

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.adapter(x) if self.switched_on else self.first(x))

    def loss(self, x: Tensor) -> Tensor:
        self._switch(False)
        with torch.no_grad():
            reference = self(x)
        self._switch(True)
        return functional.mse_loss(self(x), reference + 1)

    def _switch(self, on: bool) -> None:
        self.adapter.requires_grad_(on)
        self.switched_on = on

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.weights[f"validated {self.global_step}"] = self.loss(batch[0]).detach()


class Codebook(Plain):
    """Steps a parameter inside of forward, by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.steps_codes = torch.optim.SGD(self.codes.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            functional.mse_loss(self.codes(hidden.detach()), x).backward()
            self.steps_codes.step()
            self.steps_codes.zero_grad()
        return self.last(hidden + self.codes(hidden).detach())


class LateCodebook(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        self.steps_codes = torch.optim.SGD(self.codes.parameters(), lr=0.1)
        return super().forward(x)


class Wide(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).tanh()).double()).float()


class FrozenWide(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.last.requires_grad_(False)


@pytest.mark.parametrize("kind", [HeldTwice, Adapted])
def test_they_have_stock_ddps_weights(kind: type[Plain]) -> None:
    for found in run_distributed(differences, 2, kind, NAMES, {}):
        assert found == {name: [] for name in NAMES}


def test_ddp_keeps_fp64_as_stock_does() -> None:
    for kind in (Wide, FrozenWide):
        for found in run_distributed(differences, 2, kind, ["shard_ddp", "shard_ddp_aligned"], {}):
            assert found == {"shard_ddp": [], "shard_ddp_aligned": []}


def _refused(kind: type[Plain], names: list[str]) -> list[str]:
    found = []
    for name in names:
        with pytest.raises(ConfigurationError) as refused:
            weights(name, kind, {})
        found.append(str(refused.value))
    return found


def test_engines_that_would_round_fp64_refuse_it() -> None:
    for kind in (Wide, FrozenWide):
        for found in run_distributed(_refused, 2, kind, NAMES[1:]):
            assert all("last.weight, last.bias are fp64, but Shard" in each for each in found)


@pytest.mark.parametrize("kind", sampled([Codebook, LateCodebook], 0))
def test_a_step_inside_of_forward_is_refused_alike(kind: type[Plain]) -> None:
    for found in run_distributed(_refused, 2, kind, NAMES):
        assert len(set(found)) == 1
        assert found[0].startswith("SGD, which configure_optimizers does not return, steps codes.weight inside a ")
