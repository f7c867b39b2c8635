"""Gradients inside a step, methods other than forward, and several runs of one module."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard import ConfigurationError, ShardDDPStrategy, ShardFSDPStrategy
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters
from tests.strategies.regression import WIDTH, Layer, Regression, compare, fit


class OnlyItsOwn(Regression):
    """Parameters on the LightningModule and nowhere else, which a second pass of the step finds sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.enter = nn.Parameter(torch.eye(WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.enter.dtype) @ self.enter

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for _ in range(2):
            self.manual_backward(functional.mse_loss((batch[0] @ self.enter).float(), batch[1]))


def _refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(OnlyItsOwn, ShardFSDPStrategy(), "32-true")
    return str(error.value)


def test_parameters_of_no_module_are_refused_after_a_backward_pass_in_the_step() -> None:
    for said in run_distributed(_refused, 2):
        assert said.startswith("The step uses parameters that ShardFSDPStrategy has not gathered at that time")


class Adversarial(Regression):
    """Moves its inputs along their own gradient before the loss that counts; uses what the root has after that."""

    def build(self) -> None:
        super().build()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.shift

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        moved = x.clone().requires_grad_()
        moves = functional.mse_loss((self.net(moved) + self.shift).float(), y)
        (gradient,) = torch.autograd.grad(moves, moved)
        loss = functional.mse_loss((self.net(x + 0.1 * gradient.sign()) + self.shift).float(), y)
        self.losses.append(loss.item())
        return loss


def _check_adversarial(precision: str) -> None:
    expected = fit(Adversarial, ShardDDPStrategy(aligned=True), precision)
    for case in [{}, {"units": ["Layer", "Linear"], "reshard_after_forward": False}]:
        found = fit(Adversarial, ShardFSDPStrategy(aligned=True, **case), precision)
        assert found.losses == expected.losses, case
        compare(found, expected, case)


@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
def test_gradients_inside_a_step(precision: str) -> None:
    run_distributed(_check_adversarial, 2, precision)


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
    """Calls methods of its own and of a part everywhere, and writes down their values."""

    def build(self) -> None:
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.generated: list[Tensor] = []
        self.probe = torch.linspace(-1, 1, WIDTH)[None]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)) + self.shift

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self(x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder.encode(x) * self.shift

    def describe(self, x: Tensor) -> Tensor:
        return self.head.weight.sum(0) + self.encoder.encode(x)

    @torch.no_grad()
    def note(self, *args: Any) -> None:
        for method in (self.generate, self.encode, self.encoder.encode):
            self.generated.append(method(self.probe).float().clone())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note()
        # With gradients, besides forward.
        return super().training_step(batch, batch_idx) + self.encode(batch[0]).float().square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.note()

    on_train_batch_end = on_validation_epoch_end = on_train_epoch_end = note


def _check_methods(precision: str) -> None:
    expected = fit(Generates, ShardDDPStrategy(aligned=True), precision)
    for case in [{}, {"units": ["Encoder", "Layer"]}, {"units": ["Encoder"], "reshard_after_forward": False}]:
        found = fit(Generates, ShardFSDPStrategy(aligned=True, **case), precision)
        compare(found, expected, case)
        assert all(map(torch.equal, found.generated, expected.generated)), case
        # After the run, and again, which finds all in its place.
        assert torch.equal(found.generate(found.probe), found.generate(found.probe))
    named = fit(
        Generates, ShardFSDPStrategy(aligned=True, forward_methods=["describe", "generate", "encode"]), precision
    )
    assert named.describe(named.probe).shape == (1, WIDTH)
    # Without its name it would meet cut parameters.
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        found.describe(found.probe)


@pytest.mark.matrix
def test_other_methods_than_forward() -> None:
    run_distributed(_check_methods, 2, "bf16-mixed")


def run(module: TinyLM, strategy: Any, *, steps: int = 3, precision: str = "32-true") -> None:
    pl.seed_everything(1, verbose=False)
    quiet_trainer(strategy=strategy, max_steps=steps, precision=precision).fit(module, loader())


def _check_fit_twice() -> None:
    twice = []
    for strategy in (ShardDDPStrategy, ShardFSDPStrategy):
        module = TinyLM(tie=True)
        module.configure_model()
        first = copy.deepcopy(module.state_dict())
        for _ in range(2):
            run(module, strategy(aligned=True))
        twice.append(module)
        # And a fold that begins as the first did, from full values.
        module.load_state_dict({name: value for name, value in first.items() if not name.startswith("blocks.")}, False)
        module.blocks.load_state_dict({n[len("blocks.") :]: v for n, v in first.items() if n.startswith("blocks.")})
        run(module, strategy(aligned=True))
    assert len(twice[0].losses) == 9
    assert twice[0].losses[6:] == twice[0].losses[:3]
    assert twice[0].losses == twice[1].losses
    compare(twice[1], twice[0], "fit twice")


def _check_foreign() -> None:
    module = TinyLM()
    run(module, ShardFSDPStrategy(), steps=1)
    before = whole_parameters(module)
    for strategy, precision in [(ShardFSDPStrategy(units=["Linear"]), "32-true"), (ShardFSDPStrategy(), "bf16-mixed")]:
        with pytest.raises(ConfigurationError, match=r"sharded by an earlier run.*ckpt_path"):
            run(module, strategy, precision=precision)
    with pytest.raises(ConfigurationError, match="ShardDDPStrategy needs a module with full parameters"):
        run(module, ShardDDPStrategy())
    assert all(torch.equal(p, before[n]) for n, p in whole_parameters(module).items())


def test_one_module_in_several_runs() -> None:
    run_distributed(_check_fit_twice, 2)


def test_a_module_sharded_otherwise_is_refused() -> None:
    run_distributed(_check_foreign, 2)
