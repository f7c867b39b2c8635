"""Ways to run a sharded module: several backward passes, other methods than forward, several Trainers, evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops import utilities
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_shard import MeshConfig, ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.errors import ConfigurationError
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole, whole_parameters
from tests.strategies.test_sharding_modules import (
    BATCH,
    STEPS,
    WIDTH,
    Layer,
    Regression,
    check_equal_on_ranks,
    compare,
    data,
)

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
    """Parameters on the LightningModule and nowhere else."""

    def build(self) -> None:
        self.enter = nn.Parameter(torch.eye(WIDTH) / 2)
        self.leave = nn.Parameter(torch.eye(WIDTH) * 2)

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        return error(x.to(self.enter.dtype) @ self.enter @ self.leave, y * (turn + 1))

    def parts(self) -> list[list[nn.Parameter]]:
        return [[self.enter], [self.leave]]


class Critics(Manual):
    """Blocks inside a child, a list of a single block, and a parameter on the LightningModule."""

    def build(self) -> None:
        self.generator = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH))
        self.critics = nn.ModuleList([Layer()])
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def turn(self, turn: int, x: Tensor, y: Tensor) -> Tensor:
        made = self.generator(x) + self.shift
        made = made.detach() if turn == 1 else made
        return error(self.critics[0](made), y)

    def parts(self) -> list[list[nn.Parameter]]:
        return [[*self.generator.parameters(), self.shift], list(self.critics.parameters())]


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


def fit(kind: type[Regression], strategy: Any, precision: str = "32-true") -> Any:
    pl.seed_everything(1, verbose=False)
    module = kind()
    mine = data(world=dist.get_world_size(), rank=dist.get_rank())
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, limit_train_batches=STEPS)
    trainer.fit(module, mine, mine)
    return module


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [DirectLayers, OnlyItsOwn, Critics, TiedChildren])
def test_manual_optimization(kind: type[Manual], precision: str) -> None:
    run_distributed(_check_manual, 2, kind, precision)


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_inside_a_step(precision: str) -> None:
    run_distributed(_check_adversarial, 2, precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_unit_that_is_thawed_later(precision: str) -> None:
    run_distributed(_check_thawed, 2, precision)


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_other_methods_than_forward(precision: str) -> None:
    run_distributed(_check_methods, 2, precision)


# Several runs of one module.


def run(module: TinyLM, strategy: Any, *, steps: int = 3, precision: str = "32-true") -> None:
    pl.seed_everything(1, verbose=False)
    quiet_trainer(strategy=strategy, max_steps=steps, precision=precision).fit(module, loader())


def _check_fit_twice() -> None:
    twice = []
    for strategy in (ShardDDPStrategy, ShardFSDPStrategy):
        module = TinyLM(tie=True)
        for _ in range(2):
            run(module, strategy(aligned=True))
        twice.append(module)
    assert len(twice[0].losses) == 6
    assert twice[0].losses == twice[1].losses
    compare(twice[1], twice[0], "fit twice")


def _check_fit_then_evaluate(precision: str) -> None:
    metrics = []
    for strategy in (lambda: ShardDDPStrategy(aligned=True), lambda: ShardFSDPStrategy(aligned=True, units=["Block"])):
        module = TinyLM(dropout=0.5)
        trainer = quiet_trainer(strategy=strategy(), precision=precision)
        # First without a fit.
        found = [trainer.validate(module, loader(shuffle=False), verbose=False)[0]["val_loss"]]
        run(module, strategy(), precision=precision)
        before = whole_parameters(module)
        other = quiet_trainer(strategy=strategy(), precision=precision)
        found.append(other.validate(module, loader(shuffle=False), verbose=False)[0]["val_loss"])
        found.append(other.test(module, loader(shuffle=False), verbose=False)[0]["test_loss"])
        predictions = other.predict(module, loader(shuffle=False))
        assert predictions is not None
        metrics.append((found, torch.cat(predictions)))
        assert all(torch.equal(p, before[n]) for n, p in whole_parameters(module).items())
        # And training goes on from there.
        run(module, strategy(), precision=precision, steps=1)
        metrics[-1][0].extend(module.losses)
    (ddp, predicted), (fsdp, by_fsdp) = metrics
    assert ddp[0] != ddp[1] == ddp[2]
    assert ddp == fsdp
    assert torch.equal(predicted, by_fsdp)


def _check_foreign() -> None:
    module = TinyLM()
    run(module, ShardFSDPStrategy(), steps=1)
    before = whole_parameters(module)
    for strategy, precision in [
        (ShardFSDPStrategy(units=["Linear"]), "32-true"),
        (ShardFSDPStrategy(mesh=MeshConfig(replicate=2)), "32-true"),
        (ShardFSDPStrategy(), "bf16-mixed"),
        (ShardDDPStrategy(), "bf16-mixed"),
    ]:
        with pytest.raises(ConfigurationError, match=r"sharded by an earlier run.*ckpt_path"):
            run(module, strategy, precision=precision)
    with pytest.raises(ConfigurationError, match="ShardDDPStrategy needs a module with whole parameters"):
        run(module, ShardDDPStrategy())
    assert all(torch.equal(p, before[n]) for n, p in whole_parameters(module).items())
    # What shards nothing stands in nobody's way.
    replicated = TinyLM()
    run(replicated, ShardDDPStrategy(), steps=1)
    run(replicated, ShardFSDPStrategy(), steps=1)
    assert all(isinstance(p, DTensor) for p in replicated.parameters())


def test_one_module_in_several_runs() -> None:
    run_distributed(_check_fit_twice, 2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit_then_evaluate_with_another_trainer(precision: str) -> None:
    run_distributed(_check_fit_then_evaluate, 2, precision)


def test_a_module_sharded_otherwise_is_refused() -> None:
    run_distributed(_check_foreign, 2)


# Evaluation never in inference mode. Lightning uses it on every backend but gloo.


class SeesTheMode(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.modes: dict[str, bool] = {}

    def note(self, where: str) -> None:
        self.modes[where] = torch.is_inference_mode_enabled() or torch.is_grad_enabled()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note("validation")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note("test")
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.note("predict")
        output = super().predict_step(batch, batch_idx)
        assert not output.is_inference()
        return output

    def on_validation_epoch_end(self) -> None:
        # Parameters that a hook uses between the steps are as good for the next training step.
        self.note("hook")
        self.generate(torch.zeros(1, 8, dtype=torch.int64))

    def generate(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)


class StockModule(SeesTheMode):
    """Runs under Lightning's own strategy, to show that the backend is disguised."""

    def on_validation_epoch_end(self) -> None:
        self.note("hook")


def _check_mode(strategy: str) -> None:
    real = utilities.dist
    utilities.dist = SimpleNamespace(get_backend=lambda: "nccl")  # type: ignore[assignment]
    try:
        stock = StockModule()
        quiet_trainer(strategy="ddp").validate(stock, loader(shuffle=False), verbose=False)
        assert stock.modes == {"validation": True, "hook": True}

        pl.seed_everything(1, verbose=False)
        module = SeesTheMode()
        trainer = quiet_trainer(strategy=strategy, max_steps=3, val_check_interval=1, limit_val_batches=2)
        trainer.fit(module, loader(), loader(shuffle=False))
        assert module.modes == {"validation": False, "hook": False}
        other = quiet_trainer(strategy=strategy, limit_test_batches=2, limit_predict_batches=2)
        other.validate(module, loader(shuffle=False), verbose=False)
        other.test(module, loader(shuffle=False), verbose=False)
        other.predict(module, loader(shuffle=False))
        assert module.modes == {"validation": False, "hook": False, "test": False, "predict": False}
        run(module, strategy, steps=2)  # type: ignore[arg-type]
    finally:
        utilities.dist = real
    plain = TinyLM()
    run(plain, strategy)
    assert module.losses[:3] == plain.losses
    if "fsdp" in strategy:
        assert isinstance(module, FSDPModule)


@pytest.mark.parametrize("strategy", ["shard_ddp", "shard_fsdp", "shard_fsdp_grad_op"])
def test_evaluation_is_never_in_inference_mode(strategy: str) -> None:
    run_distributed(_check_mode, 2, strategy)
