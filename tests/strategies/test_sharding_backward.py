"""Several backward passes in a step, gradients inside it, and parameters that are thawed on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_shard import ConfigurationError, MeshConfig, ShardDDPStrategy, ShardFSDPStrategy
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import whole, whole_parameters
from tests.strategies.regression import BATCH, STEPS, WIDTH, Layer, Regression, check_equal_on_ranks, compare, data, fit

# Manual optimization: several backward passes in one step, the later ones on parameters that the earlier ones freed.


class Manual(Regression):
    """Two optimizers take turns; the second turn's forward comes after the first one's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.leaks = 0

    def trained(self) -> list[nn.Parameter]:
        return [p for o in self.trainer.optimizers for group in o.param_groups for p in group["params"]]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.seen.append(batch[0].sum().item())
        optimizers = self.optimizers()
        for turn, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            loss = self.turn(turn, *batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            # Not before, so that a gradient that reached the other's parameters in this turn stays to be seen.
            optimizer.zero_grad()
            self.leaks += sum(p.grad is not None and bool(whole(p.grad).any()) for p in self.trained())

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def parts(self) -> list[list[nn.Parameter]]:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part, lr=1e-2) for part in self.parts()]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", sum(self.turn(t, *batch) for t in range(2)), sync_dist=True)


def error(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


class DirectLayers(Manual):
    """Plain layers right on the LightningModule, none of them a unit of its own in automatic optimization."""

    def build(self) -> None:
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.enter(x).tanh()
        return error(self.leave(hidden if turn == 0 else hidden.flip(0)), y if turn == 0 else y.flip(0))

    def parts(self) -> list[list[nn.Parameter]]:
        return [list(self.enter.parameters()), list(self.leave.parameters())]


class OnlyItsOwn(Manual):
    """Parameters on the LightningModule and nowhere else, which the second turn finds sharded."""

    def build(self) -> None:
        self.enter = nn.Parameter(torch.eye(WIDTH) / 2)
        self.leave = nn.Parameter(torch.eye(WIDTH) * 2)

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        return error(x.to(self.enter.dtype) @ self.enter @ self.leave, y * (turn + 1))

    def parts(self) -> list[list[nn.Parameter]]:
        return [[self.enter], [self.leave]]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Critics(Manual):
    """Blocks inside a child, a list of a single block, and a parameter of a module of its own."""

    def build(self) -> None:
        self.generator = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH))
        self.critics = nn.ModuleList([Layer()])
        self.shift = Shift()

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        made = self.shift(self.generator(x))
        made = made.detach() if turn == 1 else made
        return error(self.critics[0](made), y)

    def parts(self) -> list[list[nn.Parameter]]:
        return [[*self.generator.parameters(), *self.shift.parameters()], list(self.critics.parameters())]


class TiedChildren(Manual):
    """Two children that share a parameter."""

    def build(self) -> None:
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(Layer(), Layer())
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        return error(self.leave(self.middle(self.enter(x))), y + turn)

    def parts(self) -> list[list[nn.Parameter]]:
        middle = set(self.middle.parameters())
        return [[p for p in self.parameters() if p not in middle], list(self.middle.parameters())]


def by_hand(kind: type[Manual], world: int) -> Manual:
    """The same turns in one process, over the batches of all ranks together."""
    module = kind()
    optimizers = module.configure_optimizers()
    for step, (x, y) in enumerate(data(BATCH * world)):
        if step == STEPS:
            return module
        for turn, optimizer in enumerate(optimizers):
            module.zero_grad()
            module.turn(turn, x, y).backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step()
    raise AssertionError("too little data")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"cpu_offload": True, "units": 1},
    {"mesh": MeshConfig(replicate=2)},
    {"accumulate_sync": "boundary"},
]


def _check_manual(kind: type[Manual], precision: str) -> None:
    # torch's DDP has to be told that a turn leaves parameters out.
    expected = fit(kind, ShardDDPStrategy(aligned=True, find_unused_parameters=True), precision)
    check_equal_on_ranks(expected)
    for case in OPTIONS:
        found = fit(kind, ShardFSDPStrategy(aligned=True, **case), precision)
        assert found.losses == expected.losses, case
        compare(found, expected, case)
        assert found.leaks == 0, case
        assert all(isinstance(p, DTensor) for p in found.parameters()), case
        assert found.trainer.callback_metrics["val_loss"] == expected.trainer.callback_metrics["val_loss"], case
    if precision == "32-true":
        reference = by_hand(kind, dist.get_world_size())
        for name, parameter in whole_parameters(expected).items():
            # Another order of sums; AdamW makes a part of a step of 1e-2 of a rounding in a gradient near zero.
            torch.testing.assert_close(parameter, whole_parameters(reference)[name], rtol=0, atol=2e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [DirectLayers, Critics, TiedChildren])
def test_manual_optimization(kind: type[Manual], precision: str) -> None:
    run_distributed(_check_manual, 2, kind, precision)


def _refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(OnlyItsOwn, ShardFSDPStrategy(), "32-true")
    return str(error.value)


def test_parameters_of_no_module_are_refused_after_a_backward_pass_in_the_step() -> None:
    for said in run_distributed(_refused, 2):
        assert said.startswith("The step uses parameters that ShardFSDPStrategy has not gathered at that time")


# Gradients inside a step, and parameters that are thawed on the way.


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
        (gradient,) = torch.autograd.grad(error(self.net(moved) + self.shift, y), moved)
        loss = error(self.net(x + 0.1 * gradient.sign()) + self.shift, y)
        self.losses.append(loss.item())
        return loss


class Thaws(Regression):
    """A whole unit is frozen at first."""

    def build(self) -> None:
        super().build()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[0].requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _check_adversarial(precision: str) -> None:
    expected = fit(Adversarial, ShardDDPStrategy(aligned=True), precision)
    for case in [{}, {"units": ["Layer", "Linear"]}, {"reshard_after_forward": False}]:
        found = fit(Adversarial, ShardFSDPStrategy(aligned=True, **case), precision)
        assert found.losses == expected.losses, case
        compare(found, expected, case)


def _check_thawed(precision: str) -> None:
    found = fit(Thaws, ShardFSDPStrategy(aligned=True), precision)
    assert not torch.equal(whole_parameters(found)["net.0.a.weight"], Thaws().net[0].a.weight)
    if precision == "bf16-mixed":
        # torch's DDP, which 32-true runs on, never learns of parameters that were frozen when it was built.
        compare(found, fit(Thaws, ShardDDPStrategy(aligned=True), precision), "thawed")
        return
    reference = Thaws()
    optimizer = reference.configure_optimizers()
    for step, batch in enumerate(data(BATCH * dist.get_world_size())):
        if step < STEPS:
            reference.on_train_batch_start(batch, step)
            optimizer.zero_grad()
            reference.loss(batch).backward()
            optimizer.step()
    for name, parameter in whole_parameters(found).items():
        # As in `by_hand`'s comparison.
        torch.testing.assert_close(parameter, whole_parameters(reference)[name], rtol=0, atol=2e-3)


@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
def test_gradients_inside_a_step(precision: str) -> None:
    run_distributed(_check_adversarial, 2, precision)


@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
def test_a_unit_that_is_thawed_later(precision: str) -> None:
    run_distributed(_check_thawed, 2, precision)


class Watching(Regression):
    """Notes at the end of each layer's backward pass which layers have reduced gradients."""

    def build(self) -> None:
        self.net = nn.Sequential(*(Layer() for _ in range(3)))
        self.reduced: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(self.look)
        return x

    def look(self, gradient: Tensor) -> None:
        weights = [(index, layer.a.weight) for index, layer in enumerate(self.net)]
        self.reduced.append([i for i, weight in weights if isinstance(weight, DTensor) and weight.grad is not None])


def _check_reduced_in_turn() -> None:
    module = fit(Watching, ShardFSDPStrategy(units=["Layer"]))
    # The hook of a layer's output comes ahead of that layer's backward pass.
    assert module.reduced == [[], [2], [1, 2]] * STEPS


def test_a_layers_gradients_are_reduced_before_the_next_ones_backward() -> None:
    run_distributed(_check_reduced_in_turn, 2)
