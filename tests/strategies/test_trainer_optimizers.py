"""Optimizers, schedulers, clipping and accumulation: sharded as replicated as by hand."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from lightning_shard import ConfigurationError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole, whole_parameters
from tests.strategies.everywhere import STRATEGIES, _fit_all, same_everywhere
from tests.strategies.indexed import PRECISIONS, Indexed, build, data

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

    synced = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", 1.0 + self.current_epoch * (1 - 2 * self.global_rank) * 0.1, sync_dist=self.synced)

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.8)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    @property
    def notes(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]


class Unsynced(Plateau):
    synced = False


def test_reduce_on_plateau_decides_alike_on_all_ranks() -> None:
    # Rank 1's own values improve; their mean does not, nor do rank 0's.
    assert same_everywhere(Plateau, "32-true", max_epochs=3)["notes"] == 0.2
    for runs in run_distributed(_fit_all, 2, ["ddp", "full"], Unsynced, "32-true", {}, {"max_epochs": 3}):
        assert [run["notes"] for run in runs.values()] == [0.2, 0.2]


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
    """A user's `optimizer_step` that leaves out steps, warms the rate up and decays a weight by itself."""

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
            self.body[0].weight.data.mul_(0.9)
        else:
            optimizer_closure()


@PRECISIONS
def test_optimizer_step_overridden_in_the_module(precision: str) -> None:
    run = same_everywhere(EverySecond, precision)
    assert run["notes"] == [True, False] * 6


class AddsUp(Indexed):
    """Leaves the gradients of every other batch for the next one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Skips(Indexed):
    """Has no loss for some batches, the last one of an accumulation among them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (3, 4) else loss


def test_gradients_left_for_the_next_step() -> None:
    same_everywhere(AddsUp, "32-true", strategies=("ddp", "full", "zero_2"))


@pytest.mark.parametrize("accumulate", sampled([2, 1], 0))
def test_one_process_may_have_no_loss(accumulate: int) -> None:
    strategies = ("ddp", "full", "zero_2")
    same_everywhere(Skips, "32-true", strategies=strategies, ranks=1, accumulate_grad_batches=accumulate)


def test_gradients_reduced_at_a_boundary_without_a_loss_are_there() -> None:
    options = {"accumulate_sync": "boundary"}
    same_everywhere(Skips, "32-true", options=options, ranks=1, accumulate_grad_batches=2)


# Accumulation


class CountSteps(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[int] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(self.trainer.fit_loop.epoch_loop.batch_idx)


@PRECISIONS
@pytest.mark.parametrize("sync", sampled(["micro_batch", "boundary"], 1))
def test_accumulation_steps_at_the_end_of_an_incomplete_window(precision: str, sync: str) -> None:
    run = same_everywhere(CountSteps, precision, options={"accumulate_sync": sync}, accumulate_grad_batches=4)
    # 6 batches in an epoch.
    assert run["notes"] == [3, 5, 3, 5]


@PRECISIONS
@pytest.mark.parametrize("sync", sampled(["micro_batch", "boundary"], 1))
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


@pytest.mark.parametrize("sync", sampled(["micro_batch", "boundary"], 1))
def test_accumulation_schedule(sync: str) -> None:
    run = same_everywhere(
        CountSteps,
        "32-true",
        options={"accumulate_sync": sync},
        callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})],
    )
    assert run["notes"] == [0, 1, 2, 3, 4, 5, 2, 5]


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


class RanksDiffer(TinyLM):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3 * (1 + self.global_rank))
        optimizer.param_groups[0]["betas"] = (0.9, 0.9 + 0.05 * self.global_rank)
        return optimizer


def _made_differently(name: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        quiet_trainer(strategy=name, max_steps=1).fit(RanksDiffer(), loader())
    return str(raised.value)


@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2"])
def test_ranks_must_make_the_same_optimizers(name: str) -> None:
    for text in run_distributed(_made_differently, 2, name):
        assert "lr is 0.002, betas is (0.9, 0.95)" in text
        assert "lr is 0.001, betas is (0.9, 0.9)" in text
