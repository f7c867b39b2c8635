"""Methods other than forward on a sharded module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ShardDDPStrategy, ShardFSDPStrategy
from tests.harness import run_distributed
from tests.models import whole_parameters
from tests.strategies.regression import WIDTH, Layer, Regression, compare, fit

# Methods other than forward.


class Encoder(nn.Module):
    """A part with a method of its own, and a list to have units in."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Generates(Regression):
    """Calls ``generate`` and ``encode`` everywhere, and writes down what they gave."""

    def build(self) -> None:
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.generated: list[tuple[str, Tensor]] = []
        self.probe = torch.linspace(-1, 1, WIDTH)[None]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)) + self.shift

    @torch.no_grad()
    def generate(self, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder.encode(x) * self.shift

    def describe(self, x: Tensor) -> Tensor:
        return self.head.weight.sum(0) + self.encoder.encode(x)

    def note(self, where: str) -> None:
        with torch.no_grad():
            for made in (self.generate(self.probe, steps=3), self.encode(self.probe), self.encoder.encode(self.probe)):
                self.generated.append((where, made.float().clone()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note("in the step")
        # With gradients, besides forward.
        return super().training_step(batch, batch_idx) + self.encode(batch[0]).float().square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("after the step")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.note("in validation")

    def on_validation_epoch_end(self) -> None:
        self.note("after validation")

    def on_train_epoch_end(self) -> None:
        self.note("after the epoch")


def _check_methods(precision: str) -> None:
    expected = fit(Generates, ShardDDPStrategy(aligned=True), precision)
    assert {where for where, _ in expected.generated} == {
        "in the step",
        "after the step",
        "in validation",
        "after validation",
        "after the epoch",
    }
    for case in [{}, {"units": ["Encoder", "Layer"]}, {"units": ["Encoder"], "reshard_after_forward": False}]:
        found = fit(Generates, ShardFSDPStrategy(aligned=True, **case), precision)
        compare(found, expected, case)
        assert [where for where, _ in found.generated] == [where for where, _ in expected.generated]
        wrong = [w for (w, a), (_, b) in zip(found.generated, expected.generated, strict=True) if not torch.equal(a, b)]
        assert not wrong, case
        # After the run, and again, which finds all in its place.
        before = whole_parameters(found)
        generated = found.generate(found.probe)
        assert torch.equal(found.generate(found.probe), generated)
        assert all(torch.equal(p, before[n]) for n, p in whole_parameters(found).items())
    named = fit(
        Generates, ShardFSDPStrategy(aligned=True, forward_methods=["describe", "generate", "encode"]), precision
    )
    assert named.describe(named.probe).shape == (1, WIDTH)
    # Without its name it would meet cut parameters.
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        found.describe(found.probe)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_other_methods_than_forward(precision: str) -> None:
    run_distributed(_check_methods, 2, precision)
