"""Optimizers, schedulers, clipping, accumulation and manual optimization: sharded as replicated as by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_shard.strategies.ddp import ShardDDPStrategy
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole, whole_parameters
from tests.strategies.test_trainer_features import PRECISIONS, Indexed, build, data, samples

STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": ShardDDPStrategy,
    "ddp_unused": lambda **kwargs: ShardDDPStrategy(find_unused_parameters=True, **kwargs),
    "full": ShardFSDPStrategy,
    "grad_op": lambda **kwargs: ShardFSDPStrategy(reshard_after_forward=False, **kwargs),
    "offload": lambda **kwargs: ShardFSDPStrategy(cpu_offload=True, **kwargs),
}


def _fit(
    strategy: str, build_module: Callable[..., Any], precision: str, options: dict[str, Any], flags: dict[str, Any]
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = build_module()
    # Both accumulate in the same order, whatever the plain names' defaults are.
    options = {"accumulate_sync": "micro_batch", **options}
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](**options),
        precision=precision,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **flags},
    )
    trainer.fit(module, data(shuffle=True), data())
    return {
        "parameters": whole_parameters(module),
        "steps": trainer.global_step,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "notes": getattr(module, "notes", None),
        "batches": str(module.seen["train"]) if hasattr(module, "seen") else module.batches,
    }


def _fit_all(strategies: list[str], *args: Any) -> dict[str, dict[str, Any]]:
    return {strategy: _fit(strategy, *args) for strategy in strategies}


def same_everywhere(
    module: Callable[..., Any],
    precision: str,
    *,
    strategies: tuple[str, ...] = ("ddp", "full"),
    options: dict[str, Any] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """Fit under each strategy at two processes; all parameters, metrics and notes must agree bitwise."""
    ranks = run_distributed(_fit_all, 2, list(strategies), module, precision, options or {}, flags)
    first = ranks[0][strategies[0]]
    for rank, strategy in itertools.product(range(2), strategies):
        run = ranks[rank][strategy]
        assert run["steps"] == first["steps"]
        for name, value in first["parameters"].items():
            assert torch.equal(run["parameters"][name], value), (rank, strategy, name)
        assert run["notes"] == first["notes"], (rank, strategy)
        assert run["metrics"] == first["metrics"], (rank, strategy)
    assert ranks[0][strategies[0]]["batches"] != ranks[1][strategies[0]]["batches"]
    return first


# Groups and schedulers


class Groups(Indexed):
    """Three groups, one of which stands still; a scheduler on each step."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.body[0].parameters(), "lr": 0.0, "weight_decay": 0.0},
            {"params": self.body[2].parameters(), "lr": 0.1},
            {"params": self.head.parameters(), "lr": 0.2, "momentum": 0.9},
        ]
        optimizer = torch.optim.SGD(groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    @property
    def notes(self) -> Any:
        return [round(lr, 9) for lr in self.scheduler.get_last_lr()]


@PRECISIONS
def test_groups_with_their_own_rates(precision: str) -> None:
    run = same_everywhere(Groups, precision)
    assert run["steps"] == 12
    assert run["notes"] == [0.0, 0.1 / 2**4, 0.2 / 2**4]
    start = {name: p.detach() for name, p in build(1).named_parameters()}
    still = {name for name, value in run["parameters"].items() if torch.equal(value, start[name])}
    assert still == {"body.0.weight", "body.0.bias"}


class Plateau(Indexed):
    """The validation loss does not improve, so the rate falls after each epoch; the ranks' own losses differ."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", 1.0 + self.current_epoch * (1 - 2 * self.global_rank) * 0.1, sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.8)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    @property
    def notes(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]


def test_reduce_on_plateau_decides_alike_on_all_ranks() -> None:
    run = same_everywhere(Plateau, "32-true", max_epochs=3)
    # Rank 1's own values improve; their mean does not.
    assert run["notes"] == 0.2


# Clipping and the norm


class Norms(Indexed):
    """Notes the logged norm and one that the test computes from whole gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [whole(p.grad) for p in self.parameters()]
        assert len(gradients) == 6
        self.own = torch.cat([g.flatten().double() for g in gradients]).norm().float().item()

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append((self.trainer.callback_metrics["grad_norm"].item(), self.own))


@PRECISIONS
@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, {"gradient_clip_val": 0.1}],
    ids=["unclipped", "value", "norm"],
)
def test_gradient_norm_is_logged(precision: str, flags: dict[str, Any]) -> None:
    run = same_everywhere(
        Norms, precision, strategies=("ddp", "full", "offload"), options={"log_grad_norm": True}, **flags
    )
    assert len(run["notes"]) == 12
    assert all(logged == own > 0.1 for logged, own in run["notes"])


class OwnClipping(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01 * (self.trainer.global_step + 1))
        self.notes.append(torch.cat([whole(p.grad).flatten() for p in self.parameters()]).double().norm().item())


def test_clipping_overridden_in_the_module() -> None:
    run = same_everywhere(OwnClipping, "32-true")
    # torch's coefficient adds 1e-6 to the norm.
    assert run["notes"] == [pytest.approx(0.01 * (step + 1), rel=1e-4) for step in range(12)]


class EverySecond(Indexed):
    """A user's `optimizer_step` that leaves out steps and warms the rate up."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[bool] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        step = batch_idx % 2 == 0
        self.notes.append(step)
        if step:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (batch_idx + 1) / 6
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@PRECISIONS
def test_optimizer_step_overridden_in_the_module(precision: str) -> None:
    run = same_everywhere(EverySecond, precision)
    assert run["notes"] == [True, False] * 6


# Accumulation


class CountSteps(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[int] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(self.trainer.fit_loop.epoch_loop.batch_idx)


@PRECISIONS
@pytest.mark.parametrize("sync", ["micro_batch", "boundary"])
def test_accumulation_steps_at_the_end_of_an_incomplete_window(precision: str, sync: str) -> None:
    run = same_everywhere(CountSteps, precision, options={"accumulate_sync": sync}, accumulate_grad_batches=4)
    # 6 batches in an epoch.
    assert run["notes"] == [3, 5, 3, 5]


@PRECISIONS
@pytest.mark.parametrize("sync", ["micro_batch", "boundary"])
def test_validation_inside_an_accumulation_window(precision: str, sync: str) -> None:
    run = same_everywhere(
        CountSteps,
        precision,
        strategies=("ddp", "full", "grad_op"),
        options={"accumulate_sync": sync},
        accumulate_grad_batches=4,
        val_check_interval=3,
    )
    # Validation is after batches 2 and 5.
    assert run["notes"] == [3, 5, 3, 5]


@pytest.mark.parametrize("sync", ["micro_batch", "boundary"])
def test_accumulation_schedule(sync: str) -> None:
    run = same_everywhere(
        CountSteps,
        "32-true",
        options={"accumulate_sync": sync},
        callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})],
    )
    assert run["notes"] == [0, 1, 2, 3, 4, 5, 2, 5]


# Manual optimization


class Gan(pl.LightningModule):
    """Two optimizers with their schedulers, the other's parameters switched off in each turn.

    The generator's output for the discriminator's turn comes from a forward without a backward.
    """

    def __init__(self, discriminator_first: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.shift = nn.Parameter(torch.zeros(3))
        self.discriminator_first = discriminator_first
        self.batches: list[list[int]] = []
        self.notes: list[Any] = []

    def fake(self, x: Tensor) -> Tensor:
        return self.generator(functional.pad(x, (0, 1), value=0.5)) + self.shift

    def score(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x).float()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def turn(self, optimizer: Any, loss: Callable[[], Tensor], clip: float) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss())
        self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
        optimizer.step()
        # Not before the backward pass: a gradient that leaked into the other's parameters must count.
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        others = [p for o in self.optimizers() if o is not optimizer for g in o.param_groups for p in g["params"]]
        self.notes.append(sum(p.grad is not None and bool(whole(p.grad).any()) for p in others))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        index, x = batch
        self.batches.append(index.tolist())
        generator, discriminator = self.optimizers()

        def generated() -> Tensor:
            return self.score(self.fake(x), real=True)

        def discriminated() -> Tensor:
            return self.score(x, real=True) + self.score(self.fake(x).detach(), real=False)

        turns = [(generator, generated, 0.2), (discriminator, discriminated, 0.1)]
        for turn in reversed(turns) if self.discriminator_first else turns:
            self.turn(*turn)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam([*self.generator.parameters(), self.shift], lr=0.05)
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (generator, discriminator)]
        return [generator, discriminator], schedulers


class DiscriminatorFirst(Gan):
    def __init__(self) -> None:
        super().__init__(discriminator_first=True)


@PRECISIONS
@pytest.mark.parametrize("module", [Gan, DiscriminatorFirst])
def test_adversaries_with_an_optimizer_each(module: type[Gan], precision: str) -> None:
    # torch's DDP must be told that a backward pass leaves parameters out.
    run = same_everywhere(module, precision, strategies=("ddp_unused", "full", "grad_op", "offload"))
    assert run["steps"] == 24
    assert run["notes"] == [0] * 24
    by_hand = adversaries_by_hand(module, precision)
    for name, value in run["parameters"].items():
        # Two halves of a batch and their mean, or the whole batch: another order of sums. In bf16 each half's
        # gradient is rounded to 2**-9 of its size, and steps of lr=0.05 at most follow from it.
        torch.testing.assert_close(value, by_hand[name], rtol=0, atol=1e-5 if precision == "32-true" else 5e-2)


def adversaries_by_hand(build_module: type[Gan], precision: str) -> dict[str, Tensor]:
    """The same training with torch alone, in fp32, on the batches of both ranks together."""
    torch.manual_seed(1)
    module = build_module()
    optimizers, schedulers = module.configure_optimizers()
    sampler = [torch.utils.data.DistributedSampler(samples(), 2, rank, shuffle=True, seed=1) for rank in range(2)]
    for epoch in range(2):
        for part in sampler:
            part.set_epoch(epoch)
        loaders = [DataLoader(samples(), batch_size=2, sampler=part) for part in sampler]
        for parts in zip(*loaders, strict=True):
            x = torch.cat([part[1] for part in parts])
            for turn in (1, 0) if module.discriminator_first else (0, 1):
                if turn == 0:
                    loss = module.score(module.fake(x), real=True)
                else:
                    loss = module.score(x, real=True) + module.score(module.fake(x).detach(), real=False)
                module.zero_grad()
                loss.backward()
                parameters = [p for g in optimizers[turn].param_groups for p in g["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, (0.2, 0.1)[turn])
                optimizers[turn].step()
        for scheduler in schedulers:
            scheduler.step()
    return {name: p.detach() for name, p in module.named_parameters()}


class ManualAccumulation(Indexed):
    """Manual optimization that steps on every third batch, and two backward passes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch, "train") / 3)
        self.manual_backward(self(batch[1]).float().square().mean() / 30)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


@PRECISIONS
def test_manual_accumulation_with_two_backward_passes(precision: str) -> None:
    run = same_everywhere(ManualAccumulation, precision, strategies=("ddp", "full", "grad_op"))
    assert run["steps"] == 4


class Several(torch.optim.SGD):
    """Calls its closure three times in a step, as LBFGS does, and steps between."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            closure()
            super().step()
        return super().step(closure)


class CallsSeveral(Indexed):
    def configure_optimizers(self) -> Any:
        return Several(self.parameters(), lr=0.05)


@PRECISIONS
def test_optimizer_that_calls_its_closure_several_times(precision: str) -> None:
    same_everywhere(CallsSeveral, precision, strategies=("ddp", "full", "grad_op"), gradient_clip_val=0.1)


class LooksBack(Indexed):
    """Forwards without a backward between backward and step: what they gather must not outlive the step."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        x = torch.ones(1, 8)
        for block in self.blocks:
            x = block(x)
        self.notes.append(float(x.sum()))


@PRECISIONS
def test_forward_between_backward_and_step(precision: str) -> None:
    same_everywhere(LooksBack, precision, strategies=("ddp", "full", "grad_op"))


class Ignored(nn.Linear):
    """Stays whole on every rank under FSDP, so its gradients are averaged apart."""


class ManualWithIgnored(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = Ignored(8, 1)
        self.notes: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch, "train"))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.notes.append(self.trainer.callback_metrics["grad_norm"].item())


def _ignored(strategy: str, precision: str) -> tuple[dict[str, Tensor], list[float]]:
    pl.seed_everything(1, verbose=False)
    module = ManualWithIgnored()
    options = {"ignored_modules": ["Ignored"]} if strategy == "full" else {}
    trainer = quiet_trainer(strategy=STRATEGIES[strategy](**options), precision=precision, max_epochs=1)
    trainer.fit(module, data())
    return whole_parameters(module), module.notes


@PRECISIONS
def test_ignored_modules_count_in_clipping_by_hand(precision: str) -> None:
    results = [run for strategy in ("ddp", "full") for run in run_distributed(_ignored, 2, strategy, precision)]
    first, notes = results[0]
    assert min(notes) > 0.1
    for parameters, others in results[1:]:
        assert others == notes
        assert all(torch.equal(parameters[name], value) for name, value in first.items())


def _twice(precision: str) -> list[dict[str, Tensor]]:
    results = []
    for strategy in ("ddp", "full"):
        pl.seed_everything(1, verbose=False)
        module = Indexed()
        for _ in range(2):
            quiet_trainer(strategy=STRATEGIES[strategy](), precision=precision, max_epochs=1).fit(module, data())
        results.append(whole_parameters(module))
    return results


@PRECISIONS
def test_second_fit_of_one_module(precision: str) -> None:
    for ddp, full in run_distributed(_twice, 2, precision):
        assert all(torch.equal(ddp[name], full[name]) for name in ddp)


class PartlyFrozen(Indexed):
    """Freezing by `requires_grad` before the fit, of parameters that a unit shares with trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body[0].weight.requires_grad_(False)
        self.body[2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


@PRECISIONS
def test_frozen_parameters_stay(precision: str) -> None:
    run = same_everywhere(PartlyFrozen, precision)
    torch.manual_seed(1)
    start = {name: p.detach() for name, p in PartlyFrozen().named_parameters()}
    still = {name for name, value in run["parameters"].items() if torch.equal(value, start[name])}
    assert still == {"body.0.weight", "body.2.weight", "body.2.bias"}
